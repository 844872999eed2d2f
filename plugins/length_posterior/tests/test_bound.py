from __future__ import annotations

import math
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given
from seer_length_posterior import plausible_tokens


def test_any_length_is_plausible_while_none_has_finished():
    assert plausible_tokens(0, 123_456, 0.01) == math.inf


@pytest.mark.parametrize(
    ("finished", "tokens", "surprise", "expected"),
    [(1, 1000, 0.01, 99_000), (2, 1000, 0.01, 9000), (2, 1000, 0.25, 1000), (4, 400, 1 / 16, 400)],
)
def test_the_bound_is_that_of_the_closed_form(finished, tokens, surprise, expected):
    assert plausible_tokens(finished, tokens, surprise) == pytest.approx(expected)


@given(
    finished=st.integers(1, 200),
    tokens=st.integers(1, 10**7),
    surprise=st.floats(1e-4, 0.5),
)
def test_the_posterior_exceeds_the_bound_with_probability_surprise(finished, tokens, surprise):
    bound = plausible_tokens(finished, tokens, surprise)
    assert (tokens / (tokens + bound)) ** finished == pytest.approx(surprise)


@given(finished=st.integers(1, 200), tokens=st.integers(1, 10**7))
def test_one_more_finished_response_lowers_the_bound_and_more_tokens_raise_it(finished, tokens):
    bound = plausible_tokens(finished, tokens, 0.01)
    assert plausible_tokens(finished + 1, tokens, 0.01) < bound < plausible_tokens(finished, tokens + 1, 0.01)


def test_with_many_responses_the_bound_is_the_quantile_of_an_exponential():
    assert plausible_tokens(10**6, 500 * 10**6, 0.01) == pytest.approx(-500 * math.log(0.01), rel=1e-4)


def test_predictions_are_calibrated_though_half_of_the_responses_are_cut_off():
    """Six responses of a rate that may be anything; what the first three to end tell of one more."""
    rng = random.Random(0)
    surprises = 0
    for _ in range(20_000):
        rate = math.exp(rng.uniform(-9, -3))
        lengths = sorted(rng.expovariate(rate) for _ in range(6))
        tokens = sum(min(length, lengths[2]) for length in lengths)
        surprises += rng.expovariate(rate) > plausible_tokens(3, tokens, 0.1)
    assert surprises / 20_000 == pytest.approx(0.1, abs=0.01)
