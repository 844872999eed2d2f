"""Step times: interpolated on the grid, continued beyond it, refused when they are none."""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from seer_core.ports.drafting import StepTimes

TIMES = StepTimes((1, 8, 32), (0, 2, 8), ((2.0, 2.2, 2.8), (3.0, 4.0, 7.0), (5.0, 9.0, 17.0)))


@pytest.mark.parametrize(
    ("batch", "draft_tokens", "seconds"),
    [
        (1, 0, 2.0),
        (32, 8, 17.0),
        (8, 1, 3.5),
        (20, 0, 4.0),
        (20, 1, (3.5 + 7.0) / 2),
        (56, 0, 7.0),
        (8, 10, 8.0),
        (0, 0, 2.0),
    ],
)
def test_step_times_are_interpolated_and_go_on_beyond_the_grid(batch, draft_tokens, seconds):
    assert TIMES.at(batch, draft_tokens) == pytest.approx(seconds)


def test_a_single_measurement_speaks_for_every_size():
    assert StepTimes((4,), (0,), ((0.5,),)).at(100, 8) == 0.5


@given(st.floats(1, 64), st.floats(0, 16), st.floats(0, 8), st.floats(0, 4))
def test_where_measured_times_rise_the_interpolation_rises(batch, draft_tokens, more_batch, more_tokens):
    assert TIMES.at(batch + more_batch, draft_tokens + more_tokens) >= TIMES.at(batch, draft_tokens) - 1e-9


@pytest.mark.parametrize(
    "bad",
    [
        ((), (), ()),
        ((1, 1), (0,), ((1.0,), (1.0,))),
        ((1,), (1,), ((1.0,),)),
        ((1,), (0, 2), ((1.0,),)),
        ((1, 2), (0,), ((1.0,),)),
        ((0,), (0,), ((1.0,),)),
        ((1,), (0,), ((0.0,),)),
        ((1,), (0,), ((float("nan"),),)),
    ],
)
def test_a_grid_with_holes_or_out_of_order_is_refused(bad):
    with pytest.raises(ValueError, match="step times"):
        StepTimes(*bad)


def test_step_times_survive_a_file_and_a_bad_file_is_refused():
    assert msgspec.json.decode(msgspec.json.encode(TIMES), type=StepTimes) == TIMES
    with pytest.raises(msgspec.ValidationError, match="rising axes"):
        msgspec.json.decode(b'{"batch": [2, 1], "draft_tokens": [0], "seconds": [[1], [1]]}', type=StepTimes)


@given(st.lists(st.floats(1e-4, 1.0), min_size=9, max_size=9), st.floats(0, 4096), st.floats(0, 64))
def test_step_times_stay_positive_however_noisy_the_profile(values, batch, draft_tokens):
    rows = tuple(tuple(values[i : i + 3]) for i in (0, 3, 6))
    assert StepTimes((1, 2, 64), (0, 1, 8), rows).at(batch, draft_tokens) >= 0.999 * min(values)
