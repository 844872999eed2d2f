"""The choice in C++ against the same in plain Python, step by step, on anything an engine may do."""

from itertools import chain

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seer_grouped_spec import DraftIndexError
from seer_grouped_spec._index import TokenChoice
from seer_grouped_spec.curves import StepCurves

from .helpers import FLAT, MEASURED, STEEP

WIDTH = 4
MOST = 32
BINS = 16
UNITS = (1.0, 32.0, 16384.0, 8.0, 8192.0, 32.0)
PRICES = (0.4, 0.7, 1.0, 1.3, 1.7, 2.5)


class ReferenceCalibration:
    def __init__(self):
        self.calls = 0
        self.totals = [[0.0] * BINS for _ in range(3)]  # tokens, predicted, accepted
        self.draw()

    def calibrate(self, probability):
        return float(np.interp(probability, self.given, self.worth))

    def learn(self, verdicts):
        if not verdicts:
            return
        keep = 0.5 ** (len(verdicts) / 4096)
        for total, item in zip(self.totals, (lambda p, _: 1.0, lambda p, _: p, lambda _, a: a), strict=True):
            fresh = [0.0] * BINS
            for probability, accepted in verdicts:
                fresh[min(int(probability * BINS), BINS - 1)] += item(probability, accepted)
            total[:] = [keep * old + new for old, new in zip(total, fresh, strict=True)]
        self.calls += 1
        if self.calls % 16 == 0:
            self.draw()

    def draw(self):
        centres = [(bin + 0.5) / BINS for bin in range(BINS)]
        count, predicted, accepted = self.totals
        weights = [8.0 + n for n in count]
        mean = [(p + 8.0 * c) / w for p, c, w in zip(predicted, centres, weights, strict=True)]
        pools = []
        for share, weight, centre in zip(accepted, weights, centres, strict=True):
            pools.append([(share + 8.0 * centre) / weight, weight, 1])
            while len(pools) > 1 and pools[-2][0] > pools[-1][0]:
                (m, w, n), (before, weight_before, bins) = pools.pop(), pools.pop()
                pools.append(
                    [(m * w + before * weight_before) / (w + weight_before), w + weight_before, n + bins]
                )
        means = [m for m, _, bins in pools for _ in range(bins)]
        self.given = [0.0, *mean, 1.0]
        self.worth = [0.0, *means, min(1.0, means[-1] / mean[-1])]


class ReferenceSteps:
    """A step is (batch, context tokens, drafting, their context tokens, draft tokens)."""

    def __init__(self, curves):
        self.curves = curves
        self.moments, self.target = 8.0 * np.eye(6), np.zeros(6)
        self.seen, self.missed = [], []
        self.scale = curves[1][0] / np.array(UNITS)
        self.weights = np.zeros(6)

    def profile_s(self, step):
        return float(np.interp(step[4] / step[0], self.curves.lengths, self.curves[step[0]]))

    def seconds(self, step):
        corrected = self.profile_s(step) + sum(w * of for w, of in zip(self.weights, (1, *step), strict=True))
        return max(corrected, self.profile_s(step) / 10)

    def costs(self, batch):
        curve = self.curves[batch]
        slope = (curve[-1] - curve[0]) / (batch * max(1, len(curve) - 1))
        return self.weights[3], self.weights[4], slope + self.weights[5]

    def learn(self, step, seconds):
        profile = self.profile_s(step)
        self.seen.append(np.array((1, *step)) * self.scale / profile)
        self.missed.append(min(seconds, 2.0 * self.seconds(step)) / profile - 1.0)
        if len(self.seen) == 32:
            keep = 0.5 ** (32 / 1024)
            seen = np.array(self.seen)
            self.moments = keep * self.moments + (1 - keep) * 8.0 * np.eye(6) + seen.T @ seen
            self.target = keep * self.target + seen.T @ self.missed
            self.weights = np.linalg.solve(self.moments, self.target) * self.scale
            self.seen, self.missed = [], []


class Reference:
    def __init__(self, curves, priority_factor=2.0):
        self.calibration, self.steps = ReferenceCalibration(), ReferenceSteps(curves)
        self.priority_factor = priority_factor
        self.longest = len(curves.lengths) - 1
        self.calls = self.plain_steps = 0
        self.probe, self.drafted, self.paths = {}, {}, {}
        self.trees = False
        self.step = self.batch = None

    def open(self, handle, probe):
        self.probe[handle], self.drafted[handle], self.paths[handle] = probe, [], []

    def learn(self, handles, texts, seconds):
        drafted = [len(self.drafted[handle]) for handle in handles]
        once = [len(text) <= most + 1 for text, most in zip(texts, drafted, strict=True)]
        if handles == self.batch and all(texts) and all(once):
            self.steps.learn(self.step, seconds)
        self.calls += 1
        if self.calls % 4 == 0:
            verdicts = []
            for handle, text, whole in zip(handles, texts, once, strict=True):
                for j, chance in enumerate(self.drafted[handle]):
                    if self.trees:
                        path = self.paths[handle][j]
                        verdicts.append((chance, len(path) < len(text) and path == text[: len(path)]))
                    elif whole:
                        verdicts.append((chance, j < len(text) - 1))
            self.calibration.learn(verdicts)

    def choose(self, handles, lengths, counts, chances, drafts=None, parents=None):
        taken = self.best(handles, lengths, [min(count, self.longest) for count in counts], chances)
        self.trees = drafts is not None
        for row, (handle, n) in enumerate(zip(handles, taken, strict=True)):
            self.drafted[handle] = chances[row][:n]
            if self.trees:
                paths = self.paths[handle] = []
                for token, parent in zip(drafts[row][:n], parents[row][:n], strict=True):
                    paths.append(([] if parent < 0 else paths[parent]) + [token])
        self.step, self.batch = self.made_of(lengths, taken), handles
        return taken

    def best(self, handles, lengths, there, chances):
        """Return, of the lengths that are best at each price, those that give the most tokens per second."""
        size = len(handles)
        if not any(there):
            return [0] * size
        gains = []
        for n, row in zip(there, chances, strict=True):
            gains.append([0.0])
            for probability in row[:n]:
                gains[-1].append(gains[-1][-1] + self.calibration.calibrate(probability))
        plain_s = self.steps.seconds(self.made_of(lengths, [0] * size))
        request, context_token, token = self.steps.costs(size)
        plans = []
        for factor in PRICES:
            price = factor * (size / plain_s)
            plan = []
            for handle, length, gain in zip(handles, lengths, gains, strict=True):
                worth = self.priority_factor if self.probe[handle] else 1.0
                left = [0.0]
                for n in range(1, len(gain)):
                    left.append(gain[n] * worth - price * (token * n + (request + context_token * length)))
                plan.append(left.index(max(left)))
            plans.append(plan)
        speeds = [
            (size + sum(gain[n] for gain, n in zip(gains, plan, strict=True)))
            / self.steps.seconds(self.made_of(lengths, plan))
            for plan in plans
        ]
        best = speeds.index(max(speeds))
        if any(plans[best]) and speeds[best] * plain_s > 1.02 * size:
            self.plain_steps = 0
            return plans[best]
        self.plain_steps += 1
        first = [gain[1] if len(gain) > 1 else 0.0 for gain in gains]
        tried = first.index(max(first)) if self.plain_steps % 64 == 0 and max(first) > 0 else None
        return [int(row == tried) for row in range(size)]

    @staticmethod
    def made_of(lengths, taken):
        drafting = [length for length, n in zip(lengths, taken, strict=True) if n]
        return len(taken), sum(lengths), len(drafting), sum(drafting), sum(taken)


@settings(max_examples=50, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from([FLAT, STEEP, MEASURED]),
    st.integers(1, WIDTH),
    st.integers(1, 9),
    st.booleans(),
)
def test_the_same_tokens_are_chosen_as_by_the_plain_reference(seed, step_times, longest, most, trees):
    random = np.random.default_rng(seed)
    curves = StepCurves(step_times, longest)
    choice, reference = TokenChoice(curves.table(MOST)), Reference(curves)
    unit_s = float(curves[1][0])
    truth = random.random(6) * unit_s / np.array(UNITS)
    handles, contexts = [], random.integers(1, 3000, 3 * most)
    for number in range(3 * 64):
        if not handles or random.random() < 0.1:  # requests come, go and move
            handles = random.permutation(3 * most)[: random.integers(1, most + 1)].tolist()
            for handle in handles:
                probe = bool(random.random() < 0.3)
                choice.open(handle, probe)
                reference.open(handle, probe)
        size = len(handles)
        batch = np.array(handles, np.int32)
        drafted = np.array([len(reference.drafted[handle]) for handle in handles])
        sampled = (1 + random.integers(0, drafted + 1) * (random.random(size) < 0.5)).astype(np.int32)
        sampled[random.random(size) < 0.02] = 0
        sampled[random.random(size) < 0.02] += 2  # of more than one step
        texts = [random.integers(0, 2, n).tolist() for n in sampled]
        seconds = unit_s if reference.step is None else float(truth @ (1, *reference.step))
        seconds *= random.uniform(0.5, 1.5)
        choice.learn(batch, sampled, np.array([*chain(*texts)], np.int32), seconds)
        reference.learn(handles, texts, seconds)
        contexts[handles] += sampled
        lengths = contexts[handles].astype(np.int32)
        sharpness = 3.0 if number % 2 else 0.2
        chances = np.minimum.accumulate(random.random((size, WIDTH)) ** sharpness, axis=1).astype(np.float32)
        counts = random.integers(0, WIDTH + 1, size).astype(np.int32)
        tree = [
            random.integers(0, 2, (size, WIDTH)).astype(np.int32),
            np.array([[random.integers(-1, j) for j in range(WIDTH)] for _ in batch], np.int32),
        ][: 2 * trees]
        expected = reference.choose(
            handles, lengths.tolist(), counts.tolist(), chances.tolist(), *(each.tolist() for each in tree)
        )
        choice.choose(batch, lengths, counts, chances, *tree)
        assert counts.tolist() == expected
        assert choice.steps.costs(size) == pytest.approx(reference.steps.costs(size), rel=1e-6, abs=1e-12)


def test_no_more_is_chosen_than_was_drafted_though_drafts_seem_to_save_time():
    choice = TokenChoice(StepCurves(FLAT, 8).table(8))
    choice.open(0, False)
    handles, lengths = np.zeros(1, np.int32), np.full(1, 100, np.int32)
    chances = np.full((1, 8), 0.9, np.float32)
    for number in range(400):
        counts = np.array([number % 4], np.int32)
        choice.choose(handles, lengths, counts, chances)
        assert counts[0] <= number % 4
        choice.learn(handles, 1 + 0 * counts, np.zeros(1, np.int32), 1.0 - 0.1 * counts[0])
    assert choice.steps.costs(1)[2] < 0


def wrong_calls():
    ok = {
        "handles": np.zeros(1, np.int32),
        "lengths": np.zeros(1, np.int32),
        "counts": np.zeros(1, np.int32),
        "chances": np.zeros((1, 4), np.float32),
    }
    read_only = np.zeros(1, np.int32)
    read_only.flags.writeable = False
    yield {**ok, "handles": np.ones(1, np.int32)}, "handles has 1, which was not opened"
    yield {**ok, "handles": np.full(1, -1, np.int32)}, "handles has -1, which was not opened"
    yield {**ok, "handles": np.zeros(1, np.int64)}, "handles holds int64"
    yield {**ok, "lengths": np.zeros(0, np.int32)}, "lengths has 0 items for 1 requests"
    yield {**ok, "counts": read_only}, "counts is read-only"
    yield {**ok, "chances": np.zeros((1, 4))}, "chances holds float64"
    yield {**ok, "chances": np.zeros((0, 4), np.float32)}, r"chances has shape \(0, 4\)"
    yield {**ok, "chances": np.zeros(4, np.float32)}, "chances has rank 1"
    tree = {**ok, "counts": np.full(1, 2, np.int32), "chances": np.ones((1, 4), np.float32)}
    tree |= {"drafts": np.ones((1, 4), np.int32), "parents": np.full((1, 4), -1, np.int32)}
    yield {**tree, "drafts": None}, "drafts is a NoneType"
    yield {**tree, "parents": np.ones((1, 3), np.int32)}, r"parents has shape \(1, 3\)"
    yield {**tree, "parents": np.ones((1, 4), np.int32)}, "parents of request 0 has 1 at 0"
    yield {**tree, "parents": np.full((1, 4), -2, np.int32)}, "parents of request 0 has -2 at 0"
    many = {name: np.zeros((9, 4) if name == "chances" else 9, array.dtype) for name, array in ok.items()}
    yield many, "batch is 9.* 1 to 8"


@pytest.mark.parametrize(("arrays", "message"), list(wrong_calls()))
def test_arrays_that_cannot_be_are_named(arrays, message):
    choice = TokenChoice(StepCurves(FLAT, 8).table(8))
    choice.open(0, False)
    with pytest.raises(DraftIndexError, match=message):
        choice.choose(**arrays)


@pytest.mark.parametrize(
    ("profile", "message"),
    [
        (np.zeros((2, 9)), "profile is not positive"),
        (np.full((2, 9), np.nan), "profile is not positive"),
        (np.ones((0, 9)), "profile is empty"),
        (np.ones((2, 9), np.float32), "profile holds float32; pass .* float64"),
    ],
)
def test_profiles_that_cannot_be_are_refused(profile, message):
    with pytest.raises(DraftIndexError, match=message):
        TokenChoice(profile)
