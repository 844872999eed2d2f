"""A vLLM whose sampling is not keyed is refused when it starts."""

import attrs
import pytest

from seer_core.errors import EngineError

pytestmark = pytest.mark.engine


@pytest.mark.parametrize(
    ("instance", "complaint"),
    [
        ("engines:Unhooked", "at position 4 of a response was not chosen where Seer chooses tokens"),
        ("engines:Unseeded", "of a response it chose token [0-9]+, and the key chooses [0-9]+"),
    ],
)
def test_an_engine_that_does_not_sample_by_key_is_refused(start, models, instance, complaint):
    with pytest.raises(EngineError, match=f"did not start: the engine does not sample by key: .*{complaint}"):
        start(models[0], change=lambda launch: attrs.evolve(launch, instance=instance))
