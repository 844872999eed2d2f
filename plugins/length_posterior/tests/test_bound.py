from __future__ import annotations

import math
import random
from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given
from seer_length_posterior import SHAPES, GroupPosterior, Shapes


def group_of(ended, running=(), shapes=None):
    """Return a group with responses that ended at so many tokens, and others that run."""
    group = GroupPosterior(shapes or Shapes())
    for tokens in running:
        group.grow(0, tokens)
    for tokens in ended:
        group.grow(0, tokens, over=True)
    return group


def with_shape(group, shape):
    """Let a group be certain of a shape."""
    group.weights = [float(shape == each) for each in SHAPES]
    return group


def drawn(rng, shape, scale):
    return max(1, round(scale * rng.expovariate(1) ** (1 / shape)))


def test_any_length_is_plausible_while_none_has_finished():
    assert group_of([], running=[500, 123_456]).plausible_tokens(500, 0.05) == math.inf


@pytest.mark.parametrize("shape", SHAPES)
@given(
    ended=st.lists(st.integers(1, 10**5), min_size=1, max_size=9),
    running=st.lists(st.integers(1, 10**5), min_size=1, max_size=9),
    surprise=st.floats(1e-4, 0.5),
)
def test_given_a_shape_the_bound_is_exceeded_with_probability_surprise(shape, ended, running, surprise):
    group = with_shape(group_of(ended, running), shape)
    generated = running[0]
    bound = group.plausible_tokens(generated, surprise)
    total = sum(tokens**shape for tokens in [*ended, *running])
    exceeded = (total / (total + bound**shape - generated**shape)) ** len(ended)
    assert exceeded == pytest.approx(surprise, rel=1e-3)


@given(ended=st.lists(st.integers(1, 10**5), min_size=1), generated=st.integers(0, 10**5))
def test_a_response_never_becomes_shorter_than_it_is(ended, generated):
    assert group_of(ended).plausible_tokens(generated, 0.05) >= generated


@given(
    ended=st.lists(st.integers(1, 10**5), min_size=1, max_size=8),
    running=st.lists(st.integers(1, 10**5), max_size=8),
)
def test_the_evidence_is_the_likelihood_averaged_over_scales(ended, running):
    """By the trapezoidal rule, over the logarithm of the scale, for each shape with the same prior."""
    evidence = []
    tops = []
    for shape in SHAPES:
        logs = []
        for step in range(-400, 1200):
            log_scale = step / 50
            rate = math.exp(-shape * log_scale)
            total = sum(tokens**shape for tokens in [*ended, *running])
            exact = len(ended) * (math.log(shape) - shape * log_scale)
            exact += (shape - 1) * sum(math.log(tokens) for tokens in ended)
            logs.append(exact - rate * total)
        tops.append(max(logs))
        evidence.append(sum(math.exp(each - tops[-1]) for each in logs))
    logs = [math.log(each) + top for each, top in zip(evidence, tops, strict=True)]
    odds = [math.exp(each - max(logs)) for each in logs]
    weights = group_of(ended, running).weights
    assert weights == pytest.approx([each / sum(odds) for each in odds], abs=1e-3)


@pytest.mark.parametrize(
    ("ended", "likeliest"), [([900, 950, 1000, 1050, 1100], 2.8), ([30, 90, 500, 600, 4000], 0.7)]
)
def test_a_groups_own_lengths_show_how_alike_they_are(ended, likeliest):
    weights = group_of(ended).weights
    assert SHAPES[weights.index(max(weights))] == likeliest
    assert sum(weights) == pytest.approx(1)


@pytest.mark.parametrize("shape", SHAPES)
def test_groups_share_how_alike_a_groups_lengths_are(shape):
    rng = random.Random(0)
    shapes = Shapes()
    for _ in range(200):
        scale = math.exp(rng.uniform(4, 9))
        group_of([drawn(rng, shape, scale) for _ in range(8)], shapes=shapes)
    newcomer = group_of([700], shapes=shapes)
    assert SHAPES[newcomer.weights.index(max(newcomer.weights))] == shape
    assert sum(shapes.groups) == pytest.approx(len(SHAPES) + 201)


def test_a_group_is_counted_once_however_often_it_speaks():
    shapes = Shapes()
    group = group_of([10], shapes=shapes)
    for tokens in range(20):
        group.grow(tokens, tokens + 1)
    assert sum(shapes.groups) == pytest.approx(len(SHAPES) + 1)


def test_the_longer_siblings_have_run_the_more_is_plausible():
    bounds = [group_of([1000], running=[tokens]).plausible_tokens(0, 0.05) for tokens in (10, 1000, 5000)]
    assert all(less < more for less, more in pairwise(bounds))


def test_growing_bit_by_bit_is_growing_at_once():
    piecemeal = GroupPosterior(Shapes())
    for before, after in pairwise((0, 16, 100, 700)):
        piecemeal.grow(before, after)
    piecemeal.grow(700, 1234, over=True)
    at_once = group_of([1234])
    assert piecemeal.totals == pytest.approx(at_once.totals)
    assert piecemeal.weights == pytest.approx(at_once.weights)


@pytest.mark.parametrize("shape", SHAPES)
def test_predictions_are_calibrated_though_half_of_the_responses_are_cut_off(shape):
    """Six responses of a scale that may be anything; the first three to end predict one more."""
    rng = random.Random(0)
    surprises = 0
    for _ in range(20_000):
        scale = math.exp(rng.uniform(6, 9))
        lengths = sorted(drawn(rng, shape, scale) for _ in range(6))
        group = with_shape(group_of(lengths[:3], running=[lengths[2]] * 3), shape)
        surprises += drawn(rng, shape, scale) > group.plausible_tokens(0, 0.1)
    assert surprises / 20_000 == pytest.approx(0.1, abs=0.01)
