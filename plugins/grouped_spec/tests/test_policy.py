"""The draft-length policy: against brute force, against the paper's formula, and against bad luck."""

from itertools import accumulate, product

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from seer_grouped_spec.policy import EXPLORE_EVERY, EXPLORE_SHARE, MarginalBenefit

from seer_core.ports.drafting import DraftPolicy, StepTimes

from .helpers import FLAT, MEASURED, STEEP


def trained(step_times, beta, longest=None, **more):
    """Return a policy that has seen so many drafts that it believes ``beta``."""
    policy = MarginalBenefit(step_times, len(beta) if longest is None else longest, refresh=1, **more)
    for _ in range(20):
        policy.record_acceptance([1e4] * len(beta), [1e4 * share for share in beta])
    return policy


def speed(step_times, beta, probes, others, lengths, factor=1.0):
    gained = [0.0, *accumulate(beta)]
    batch = probes + others
    drafts = (probes * lengths[0] + others * lengths[1]) / batch
    tokens = probes * factor * (1 + gained[lengths[0]]) + others * (1 + gained[lengths[1]])
    return tokens / step_times.at(batch, drafts)


def paper_lengths(step_times, beta, probes, others, longest, factor):
    """Algorithm 1 as printed: constant acceptance, a budget, benefits that are differences of beta."""
    batch = probes + others
    a = beta[0]
    t_sd = [
        step_times.at(batch, g) * (1 - a) / (1 - a ** (g + 1)) if a < 1 else step_times.at(batch, g) / (g + 1)
        for g in range(longest + 1)
    ]
    best = min(range(longest + 1), key=lambda g: (t_sd[g], g))
    budget = best * batch
    if best == 0 or budget < probes:
        return 0, 0
    at = [1.0, *beta, 0.0]
    ours, theirs, budget = int(probes > 0), 0, budget - probes
    while True:
        our_gain = probes * (at[ours] - at[ours + 1])
        their_gain = others * (at[theirs] - at[theirs + 1])
        if our_gain > factor * their_gain and ours < longest and probes <= budget:
            ours, budget = ours + 1, budget - probes
        elif others and theirs < longest and others <= budget:
            theirs, budget = theirs + 1, budget - others
        else:
            return ours, theirs


betas = st.lists(st.floats(0.0, 1.0), min_size=1, max_size=4).map(lambda falls: list(accumulate(falls, min)))


@st.composite
def step_times(draw):
    """Any profile in which neither a larger batch nor a longer draft is faster."""
    batch, drafts = (1, 4, 16), (0, 1, 4)
    cells = draw(st.lists(st.floats(0.0, 2.0), min_size=9, max_size=9))
    rises = np.array(cells).reshape(3, 3)
    rises[0, 0] += 0.1
    seconds = rises.cumsum(0).cumsum(1)
    return StepTimes(batch, drafts, tuple(map(tuple, seconds.tolist())))


def test_it_satisfies_the_port():
    policy: DraftPolicy = MarginalBenefit(FLAT)
    assert policy.lengths(1, 1) == (8, 8)


@pytest.mark.parametrize(
    "wrong", [{"max_draft_tokens": -1}, {"priority_factor": 0.5}, {"refresh": 0}, {"priority_factor": np.nan}]
)
def test_settings_that_make_no_sense_are_refused(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        MarginalBenefit(FLAT, **wrong)


@given(step_times(), betas, st.integers(0, 9), st.integers(0, 9), st.sampled_from([1.0, 2.0, 10.0]))
def test_drafts_are_never_slower_than_none_and_probes_come_first(times, beta, probes, others, factor):
    assume(probes + others)
    policy = trained(times, beta, priority_factor=factor)
    ours, theirs = lengths = policy.lengths(probes, others)
    assert min(lengths) >= 0
    assert max(lengths) <= len(beta)
    assert ours >= theirs or not probes
    plain = policy.tokens_per_s(probes, others, (0, 0))
    assert policy.tokens_per_s(probes, others, lengths) >= plain
    assert lengths == (0, 0) or policy.tokens_per_s(probes, others, lengths) > 1.02 * plain
    assert lengths == trained(times, beta, priority_factor=factor).lengths(probes, others)


@given(step_times(), betas, st.integers(0, 9), st.integers(0, 9), st.sampled_from([1.0, 2.0]))
def test_lengths_are_the_optimum_by_brute_force(times, beta, probes, others, factor):
    assume(probes + others)
    policy = trained(times, beta, priority_factor=factor, least_gain=0.0)
    known = policy.acceptance
    pairs = [
        pair
        for pair in product(range(len(beta) + 1 if probes else 1), range(len(beta) + 1 if others else 1))
        if (pair[0] >= pair[1] or not probes)
        and speed(times, known, probes, others, pair) > speed(times, known, probes, others, (0, 0))
    ]
    found = speed(times, known, probes, others, policy.lengths(probes, others), factor)
    best = max((speed(times, known, probes, others, pair, factor) for pair in pairs), default=None)
    if best is not None:
        assert found == pytest.approx(best, rel=1e-9)


@given(step_times(), st.floats(0.0, 0.98), st.floats(0.0, 0.98), st.integers(1, 20))
def test_more_acceptance_never_means_shorter_drafts(times, one, other, batch):
    low, high = sorted((one, other))
    assume(high - low > 1e-6)
    shorter, longer = (
        trained(times, [a**j for j in range(1, 5)], least_gain=0.0).lengths(0, batch)[1] for a in (low, high)
    )
    assert shorter <= longer


def test_speculation_is_off_where_nothing_is_accepted_and_where_steps_grow_with_tokens():
    assert trained(FLAT, [0.0] * 8).lengths(2, 6) == (0, 0)
    assert trained(STEEP, [0.9**j for j in range(1, 9)]).lengths(8, 56) == (0, 0)


def test_speculation_is_on_where_drafts_are_free():
    assert trained(FLAT, [0.5**j for j in range(1, 9)]).lengths(2, 6) == (8, 8)


def test_measured_steps_give_long_drafts_in_the_tail_and_none_in_a_full_batch():
    policy = trained(MEASURED, [0.35**j for j in range(1, 9)])
    alone, some, full = (policy.lengths(0, batch)[1] for batch in (1, 8, 32))
    assert alone > 2
    assert 0 < some < alone
    assert full == 0


def test_a_probe_gets_a_longer_draft_than_the_others():
    ours, theirs = trained(MEASURED, [0.6**j for j in range(1, 9)], priority_factor=4.0).lengths(1, 11)
    assert ours > theirs


def test_the_printed_algorithm_is_never_faster_and_prefers_the_larger_class():
    beta = [0.6**j for j in range(1, 9)]
    policy = trained(MEASURED, beta, priority_factor=1.0, least_gain=0.0)
    reversed_somewhere = False
    for probes, others in product(range(1, 9), range(1, 9)):
        printed = paper_lengths(MEASURED, beta, probes, others, 8, 1.0)
        mine = policy.lengths(probes, others)
        reversed_somewhere |= printed[0] < printed[1]
        if printed[0] >= printed[1]:
            assert policy.tokens_per_s(probes, others, mine) >= policy.tokens_per_s(probes, others, printed)
    assert reversed_somewhere


def test_nothing_to_run_or_to_draft_is_no_speculation():
    assert MarginalBenefit(FLAT).lengths(0, 0) == (0, 0)
    assert MarginalBenefit(FLAT, 0).lengths(3, 3) == (0, 0)


def test_acceptance_is_learnt_forgotten_and_falls_with_position():
    policy = trained(FLAT, [0.9, 0.8, 0.1])
    assert policy.acceptance == pytest.approx((0.9, 0.8, 0.1), abs=0.03)
    for _ in range(100):
        policy.record_acceptance([32.0], [3.2])
    first, second, third = policy.acceptance
    assert first == pytest.approx(0.1, abs=0.02)
    # Positions no longer drafted fall back on the one before.
    assert second == pytest.approx(first**2, abs=0.02)
    assert third <= second


def test_what_is_learnt_shows_after_so_many_calls():
    policy = MarginalBenefit(FLAT, 2, refresh=4)
    before = policy.acceptance
    for _ in range(3):
        policy.record_acceptance([1000.0] * 2, [1000.0] * 2)
    assert policy.acceptance == before
    policy.record_acceptance([], [])
    assert policy.acceptance[0] > 0.9


def test_being_off_is_left_again_at_a_bounded_cost():
    policy = trained(MEASURED, [0.0] * 4)
    asked = [policy.lengths(1, 3) for _ in range(EXPLORE_EVERY * 50)]
    explored = [lengths for lengths in asked if lengths != (0, 0)]
    assert set(explored) == {(1, 1)}
    plain, drafted = MEASURED.at(4, 0), MEASURED.at(4, 1)
    assert len(explored) * (drafted - plain) <= EXPLORE_SHARE * len(asked) * plain
    steps = 0
    while policy.lengths(1, 3) in ((0, 0), (1, 1)):
        steps += 1
        policy.record_acceptance([4.0], [3.6])
        assert steps < 10_000


def test_exploring_costs_no_more_where_all_drafts_have_one_length():
    policy = trained(MEASURED, [0.0] * 8, allowed=(0, 8))
    asked = [policy.lengths(0, 8) for _ in range(EXPLORE_EVERY * 100)]
    explored = len(asked) - asked.count((0, 0))
    plain, drafted = MEASURED.at(8, 0), MEASURED.at(8, 8)
    assert 0 < explored * (drafted - plain) <= EXPLORE_SHARE * len(asked) * plain


def test_what_was_explored_shows_at_once_however_late_its_verdict_comes():
    policy = MarginalBenefit(MEASURED, 4, refresh=1000)
    for _ in range(1000):
        policy.record_acceptance([4.0], [0.0])
    while not policy.exploring:
        policy.lengths(0, 4)
    before = policy.acceptance
    policy.record_acceptance([0.0], [0.0])
    policy.record_acceptance([], [])
    assert policy.exploring
    policy.record_acceptance([4.0], [4.0])
    assert not policy.exploring
    assert policy.acceptance > before


def test_exploring_is_spared_where_drafts_could_never_pay():
    policy = trained(STEEP, [0.0] * 8)
    assert {policy.lengths(0, 64) for _ in range(10_000)} == {(0, 0)}
