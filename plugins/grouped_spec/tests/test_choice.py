"""Which draft tokens are verified: what pays by the costs as they are, learnt from real steps."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_grouped_spec._index import Calibration, Step, StepModel, TokenChoice
from seer_grouped_spec.choice import OneLengthChoice
from seer_grouped_spec.curves import StepCurves
from seer_grouped_spec.policy import MarginalBenefit

from seer_core.ports.drafting import StepTimes

from .helpers import FLAT, MEASURED, STEEP

EXPLORE_EVERY, REFRESH = TokenChoice.EXPLORE_EVERY, StepModel.REFRESH


def profile(step_times, longest=8):
    return StepCurves(step_times, longest).table(64)


def make(step_times, longest=8, priority_factor=2.0, least_gain=0.02):
    return TokenChoice(profile(step_times, longest), priority_factor, least_gain)


def choose(choice, predicted, counts=None, contexts=None, probes=None):
    predicted = np.array(predicted, np.float32)
    size, width = predicted.shape
    counts = np.full(size, width, np.int32) if counts is None else np.array(counts, np.int32)
    contexts = np.full(size, 100, np.int32) if contexts is None else np.array(contexts, np.int32)
    handles = np.arange(size, dtype=np.int32)
    for handle in range(size):
        choice.open(handle, bool(probes and probes[handle]))
    choice.choose(handles, contexts, counts, predicted)
    return counts.tolist()


@st.composite
def candidates(draw):
    size, width = draw(st.integers(1, 4)), draw(st.integers(1, 4))
    row = st.lists(st.floats(0, 1, width=32), min_size=width, max_size=width)
    rows = draw(st.lists(row, min_size=size, max_size=size))
    counts = draw(st.lists(st.integers(0, width), min_size=size, max_size=size))
    return np.minimum.accumulate(np.array(rows, np.float32), axis=1), np.array(counts, np.int32)


@given(candidates(), st.floats(0, 3))
def test_the_chosen_tokens_are_nearly_the_best_by_brute_force_and_never_worse_than_none(given, slope):
    predicted, counts = given
    size = len(counts)
    times = StepTimes((size,), (0, 4), ((1.0, 1.0 + 4 * slope),))

    def rate(taken):
        tokens = size + sum(float(predicted[row, :n].sum()) for row, n in enumerate(taken))
        return tokens / times.at(size, sum(taken) / size)

    chosen = choose(make(times, 4, least_gain=0.0), predicted, counts)
    assert all(n <= count for n, count in zip(chosen, counts, strict=True))
    best = max(rate(taken) for taken in product(*(range(n + 1) for n in counts.tolist())))
    assert rate(chosen) >= rate([0] * size) - 1e-6
    assert rate(chosen) >= 0.93 * best


def test_free_drafts_are_all_taken_and_costly_ones_none():
    chances = [[0.5, 0.3, 0.1]] * 4
    assert choose(make(FLAT), chances) == [3, 3, 3, 3]
    assert choose(make(STEEP), chances) == [0, 0, 0, 0]


def test_the_likeliest_tokens_of_the_batch_are_taken_from_any_request():
    times = StepTimes((4,), (0, 8), ((4.0, 20.0),))
    assert choose(make(times), [[0.95, 0.9, 0.85], [0.3, 0.2, 0.1], [0.9, 0.1, 0.05], [0.0] * 3]) == [
        3,
        0,
        1,
        0,
    ]


def test_a_probe_s_tokens_count_more():
    times = StepTimes((2,), (0, 8), ((2.0, 14.0),))
    chances = [[0.9, 0.5], [0.9, 0.5]]
    assert choose(make(times), chances, probes=[False, True]) == [0, 1]
    assert choose(make(times, priority_factor=1.0), chances, probes=[False, True]) == [1, 1]


def test_nothing_to_draft_is_nothing_chosen():
    assert choose(make(FLAT), [[0.9], [0.9]], counts=[0, 0]) == [0, 0]
    assert choose(make(FLAT, 0), [[0.9], [0.9]]) == [0, 0]


def test_no_more_is_chosen_than_the_profile_was_made_for():
    assert choose(make(FLAT, 2), np.ones((3, 5))) == [2, 2, 2]


def test_while_nothing_pays_one_token_is_tried_now_and_then():
    choice = make(STEEP)
    chosen = [choose(choice, [[0.1], [0.3], [0.2]]) for _ in range(2 * EXPLORE_EVERY)]
    assert [sum(each) for each in chosen] == ([0] * (EXPLORE_EVERY - 1) + [1]) * 2
    assert chosen[EXPLORE_EVERY - 1] == [0, 1, 0]


def test_wrong_predictions_soon_cost_nothing():
    choice = make(MEASURED)
    verified = 0
    for _ in range(400):
        total = sum(choose(choice, np.full((8, 4), 0.9)))
        verified += total
        choice.calibration.learn([(0.9, False)] * total)
    # All 32 of each step until the calibration is looked at, then one now and then.
    assert verified < 32 * 20 + 400 / EXPLORE_EVERY + 1


def test_costs_that_the_profile_does_not_show_are_learnt_from_real_steps():
    choice = make(FLAT)
    short_and_long = [50, 2000]
    assert choose(choice, [[0.6], [0.6]], contexts=short_and_long) == [1, 1]
    random = np.random.default_rng(0)
    for _ in range(2000):
        drafting = random.random(2) < 0.5
        contexts = np.array(short_and_long) + random.integers(0, 50, 2)
        seconds = 1.0 + 0.001 * contexts[drafting].sum()  # a drafting request costs by its context
        step = Step(2, int(contexts.sum()), int(drafting.sum()), int(contexts[drafting].sum()), 1)
        choice.steps.learn(step, seconds)
    assert choose(choice, [[0.6], [0.6]], contexts=short_and_long) == [1, 0]


# The model of a step.


def real(step):
    return (
        0.002
        + 0.0001 * step.batch
        + 2e-7 * step.context_tokens
        + 5e-5 * step.drafting
        + 3e-7 * step.drafting_context_tokens
        + 6e-5 * step.draft_tokens
    )


def steps(count, seed):
    random = np.random.default_rng(seed)
    for _ in range(count):
        batch = int(random.integers(1, 33))
        contexts = random.integers(20, 2000, batch)
        drafts = random.integers(0, 9, batch) * (random.random(batch) < 0.4)
        yield Step(
            batch,
            int(contexts.sum()),
            int((drafts > 0).sum()),
            int(contexts[drafts > 0].sum()),
            int(drafts.sum()),
        )


TIMES = StepTimes((1, 64), (0, 8), ((0.002, 0.0025), (0.006, 0.03)))


def test_the_profile_is_believed_until_steps_say_otherwise():
    model = StepModel(profile(TIMES))
    assert model.seconds(Step(64, 9999, 64, 9999, 512)) == pytest.approx(0.03)
    for step in steps(REFRESH - 1, 1):
        model.learn(step, real(step))
    assert model.seconds(Step(64, 9999, 64, 9999, 512)) == pytest.approx(0.03)


def test_real_steps_are_predicted_though_the_profile_is_wrong_and_the_machine_noisy():
    model = StepModel(profile(TIMES))
    random = np.random.default_rng(2)
    for step in steps(4000, 3):
        late = 5.0 if random.random() < 0.02 else 1.0  # another process had the core
        model.learn(step, real(step) * late * random.uniform(0.9, 1.1))
    missed = [abs(model.seconds(step) / real(step) - 1) for step in steps(200, 4)]
    assert np.median(missed) < 0.08
    assert max(missed) < 0.5


@given(st.lists(st.floats(1e-9, 1e3), min_size=REFRESH * 2, max_size=REFRESH * 2))
def test_no_measurement_makes_a_step_take_no_time(measured):
    model = StepModel(profile(FLAT))
    for seconds in measured:
        model.learn(Step(8, 100, 1, 10, 3), seconds)
    for step in (Step(8, 100, 0, 0, 0), Step(1, 5000, 1, 5000, 8), Step(64, 0, 64, 0, 512)):
        assert 0.1 <= model.seconds(step) < np.inf


# Calibration.


def test_predictions_are_taken_at_their_word_at_first():
    chances = np.linspace(0, 1, 33).tolist()
    calibration = Calibration()
    assert [calibration.calibrate(chance) for chance in chances] == pytest.approx(chances, abs=1e-9)


def test_predictions_twice_too_high_are_halved():
    calibration = Calibration(refresh=1)
    predicted = np.tile(np.linspace(0.02, 0.98, 49), 40)
    outcome = np.arange(predicted.size) * 0.618034 % 1 < predicted / 2
    for _ in range(10):
        calibration.learn(list(zip(predicted.tolist(), outcome.tolist(), strict=True)))
    chances = [0.2, 0.5, 0.8]
    assert [2 * calibration.calibrate(chance) for chance in chances] == pytest.approx(chances, abs=0.16)


@given(st.lists(st.tuples(st.floats(0, 1), st.booleans()), max_size=60), st.integers(1, 30))
def test_calibration_keeps_the_order_and_stays_a_probability(verdicts, times):
    calibration = Calibration(refresh=1)
    for _ in range(times):
        calibration.learn(verdicts)
    worth = np.array([calibration.calibrate(chance) for chance in np.linspace(0, 1, 101).tolist()])
    assert (np.diff(worth) >= -1e-12).all()
    assert worth.min() >= 0
    assert worth.max() <= 1


# One length for all requests.


def one_length(step_times, longest=8, lengths=(0, 2, 4, 8)):
    policy = MarginalBenefit(step_times, longest, refresh=1, allowed=lengths)
    choice = OneLengthChoice(policy, lengths)
    for handle in range(8):
        choice.open(handle, False)
    return choice


def drafted(choice, counts):
    handles, counts = np.arange(len(counts), dtype=np.int32), np.array(counts, np.int32)
    choice.choose(handles, handles, counts, None)
    return counts.tolist()


def learn(choice, written):
    handles, written = np.arange(len(written), dtype=np.int32), np.array(written, np.int32)
    for _ in range(TokenChoice.LEARN_EVERY):
        choice.learn(handles, written, written, 0.0)


def test_all_drafts_of_a_step_are_cut_to_one_of_the_lengths_that_pays_for_the_batch():
    times = StepTimes((4,), (0, 2, 4, 8), ((1.0, 1.05, 1.1, 9.0),))
    assert drafted(one_length(times), [8, 5, 1, 0]) == [4, 4, 1, 0]
    assert drafted(one_length(FLAT), [8, 5, 1, 0]) == [8, 5, 1, 0]
    assert drafted(one_length(STEEP), [8, 5, 1, 0]) == [0, 0, 0, 0]


def test_what_a_length_gives_is_learnt_over_all_requests_those_that_were_padded_too():
    times = StepTimes((4,), (0, 8), ((1.0, 1.3),))
    one, many = (one_length(times, lengths=(0, 8)) for _ in range(2))
    for _ in range(100):
        drafted(one, [8, 0, 0, 0])
        learn(one, [2, 1, 1, 1])  # one request of four accepts a token
        drafted(many, [8, 8, 8, 8])
        learn(many, [2, 2, 2, 2])
    assert drafted(one, [8, 0, 0, 0]) == [0, 0, 0, 0]
    assert max(drafted(many, [8, 8, 8, 8])) > 0


@given(candidates(), st.sampled_from([FLAT, MEASURED, STEEP]))
def test_one_length_never_lengthens_a_draft_and_is_one_of_those_allowed(given, times):
    _, counts = given
    before = counts.tolist()
    after = drafted(one_length(times), before)
    assert all(new <= old for new, old in zip(after, before, strict=True))
    ceiling = max(after)
    assert after == [min(count, ceiling) for count in before]
