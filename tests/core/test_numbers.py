import msgspec
import pytest

from seer_core.plugins.config_types import MOST, NotNegative, Positive, Seconds, Share


@pytest.mark.parametrize("kind", [NotNegative, Positive, Seconds, Share])
@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), MOST * 10, -1.0])
def test_what_is_not_finite_or_beyond_anything_meant_is_refused(kind, value):
    with pytest.raises(msgspec.ValidationError):
        msgspec.convert(value, kind)


@pytest.mark.parametrize("kind", [NotNegative, Positive, Seconds, Share])
def test_plain_numbers_are_taken(kind):
    assert msgspec.convert(0.5, kind) == 0.5
    assert msgspec.convert(1, kind) == 1.0
