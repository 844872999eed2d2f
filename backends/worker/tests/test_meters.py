"""Meters ask an engine for the right work, count the right steps, and leave nothing behind."""

from math import inf

import pytest
from seer_worker.process.meters import MoveProfiler, Sizes, Step, StepProfiler, start_grid

SIZES = Sizes(
    vocab=50, model_tokens=1000, running=8, step_tokens=64, draft_tokens=4, block_tokens=16, blocks=60
)


class Paper:
    """An engine without a model: prompts take a step of their own each, then all decode."""

    def __init__(self, sizes=SIZES, pooled=False):
        self.sizes = sizes
        self.pooled = pooled
        self.left, self.prompts, self.drafts = {}, [], 0
        self.events = []
        self.decoded = 0
        self.plans = lambda requests, positions: Step(requests, positions)

    def add(self, name, prompt, max_tokens, *, save=False):
        assert all(0 <= token < self.sizes.vocab for token in prompt)
        assert len(prompt) + max_tokens <= self.sizes.model_tokens
        self.events.append(("add", len(prompt), max_tokens, save))
        self.prompts.append((name, len(prompt), max_tokens))

    def step(self):
        if self.prompts:
            name, tokens, most = self.prompts.pop(0)
            self.left[name] = most - 1
            return Step(1, tokens)
        for name in self.left:
            self.left[name] -= 1
        self.decoded += 1
        return self.plans(len(self.left), len(self.left) * (1 + self.drafts))

    @property
    def busy(self):
        return bool(self.prompts) or any(self.left.values())

    def drop(self, names):
        for name in names:
            del self.left[name]

    def make_up_drafts(self, tokens):
        self.drafts = tokens or 0
        self.events.append(("drafts", tokens))

    def reset_cache(self):
        assert not self.busy
        self.events.append(("reset",))

    def forget_saved(self):
        self.events.append(("forget",))


def test_at_a_start_the_grid_is_coarse_and_has_both_ends():
    assert start_grid(running=6, draft_tokens=3) == ((1, 4, 6), (0, 1, 2, 3))


@pytest.mark.parametrize(("cell_s", "steps"), [(0.0, 3), (inf, 12)])
def test_a_cell_ends_after_its_time_with_its_fewest_steps(cell_s, steps):
    bench = Paper()
    assert StepProfiler(bench, cell_s).measure((4,), (0, 2)) is not None
    assert bench.decoded == 2 * steps


def test_steps_are_measured_on_the_sizes_that_fit():
    bench = Paper()
    times = StepProfiler(bench).measure((1, 4, 8, 9), (0, 2, 7))
    assert times.batch == (1, 4, 8)
    assert times.draft_tokens == (0, 2)
    assert times.context_tokens > 64
    assert bench.left == {}
    assert [words[1] for words in bench.events if words[0] == "drafts"] == [0, 2, None] * 3


@pytest.mark.parametrize("tight", [{"step_tokens": 3}, {"blocks": 8}, {"model_tokens": 70}])
def test_a_size_that_does_not_fit_is_left_out(tight):
    assert StepProfiler(Paper(SIZES._replace(**tight))).measure((2,), (2,)) is None


def test_steps_that_were_planned_differently_do_not_count():
    bench = Paper()
    bench.plans = lambda requests, positions: Step(requests - 1, positions)
    assert StepProfiler(bench).measure((4,), (0,)) is None
    assert bench.left == {}


def test_without_drafts_none_are_made_up():
    bench = Paper(SIZES._replace(draft_tokens=0))
    assert StepProfiler(bench).measure((2,), (0, 4)).draft_tokens == (0,)
    assert not any(words[0] == "drafts" for words in bench.events)


@pytest.mark.parametrize("pooled", [False, True])
def test_a_move_is_measured_computed_cached_and_fetched(pooled):
    bench = Paper(pooled=pooled)
    measured = MoveProfiler(bench).measure()
    expected = {"prefill_s_per_token", "chunk_s_per_token", "step_s", "chunk_s"}
    assert set(measured) == expected | ({"fetch_s_per_token"} if pooled else set())
    assert all(seconds >= 0 for seconds in measured.values())
    assert any(words[-1] is True for words in bench.events if words[0] == "add") == pooled
    assert (("forget",) in bench.events) == pooled
    assert bench.left == {}


def test_where_two_blocks_do_not_fit_nothing_is_measured():
    bench = Paper(SIZES._replace(blocks=2))
    assert MoveProfiler(bench).measure() == {}
    assert bench.events == []
