"""How long an engine takes for what, measured on the idle engine itself: steps, and going on elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import inf
from statistics import median
from time import perf_counter
from typing import NamedTuple, Protocol

import numpy as np
import structlog

from seer_core.ports.drafting import StepTimes

__all__ = [
    "CELL_S",
    "BenchMeters",
    "MoveProfiler",
    "Profilable",
    "Sizes",
    "Step",
    "StepProfiler",
    "start_grid",
]

log = structlog.get_logger("seer")

CONTEXT_TOKENS = 64
"""Prompt tokens of each request by default."""
STEPS = 12
FEWEST_STEPS = 3
CELL_S = 0.1
"""How long a cell is measured at a start, once it has its fewest steps: large steps vary less."""
TRIES = 30
"""Steps made at most for one cell; one that was planned differently, as in a preemption, does not count."""
MOVED_TOKENS = 1024
"""Context measured, if so much fits: long enough to stand out from a step's fixed cost."""
ROUNDS = 3
"""The first warms up and does not count."""
RUNNING = 32
"""Requests of the step that a chunk's end is compared with."""


class Sizes(NamedTuple):
    """Limits of an engine: tokens of the vocabulary and of a request, requests and positions of a step,
    tokens of a draft, and KV in so many blocks of so many tokens.  ``draft_lengths`` are those that steps
    have, where not all are.
    """

    vocab: int
    model_tokens: int
    running: int
    step_tokens: int
    draft_tokens: int
    block_tokens: int
    blocks: int
    draft_lengths: tuple[int, ...] = ()


class Step(NamedTuple):
    """The size of a step: so many requests, so many positions of them."""

    requests: int
    positions: int


class Profilable(Protocol):
    """An idle engine as it is measured: made-up requests, sampled at temperature 1, and steps.

    A request runs to its last token, also past an end-of-text token.  It finds the KV of earlier ones, but no
    chunk's.
    """

    sizes: Sizes
    pooled: bool
    """Whether KV can be saved to a pool and fetched from it."""

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, *, save: bool = False) -> None:
        """Queue a request; with ``save`` its KV goes to the pool when it has ended."""
        ...

    def step(self) -> Step:
        """Make one step; return what it computed."""
        ...

    @property
    def busy(self) -> bool:
        """Whether a request has tokens to write."""
        ...

    def drop(self, names: Sequence[str]) -> None:
        """Forget requests, ended or not; their KV stays."""
        ...

    def make_up_drafts(self, tokens: int | None) -> None:
        """Draft so many meaningless tokens for every request, until called with None."""
        ...

    def reset_cache(self) -> None:
        """Forget the KV in the engine's own cache."""
        ...

    def forget_saved(self) -> None:
        """Forget the KV that was saved."""
        ...


def start_grid(running: int, draft_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return batch sizes and draft lengths that an instance can wait for when it starts, ``CELL_S`` each.

    Between them ``StepTimes`` interpolates, and the drafter estimates the rest from its steps.
    """
    return (*_powers(4, running),), (0, *_powers(2, draft_tokens))


class BenchMeters:
    """The ``Meters`` of an engine as a ``bench``."""

    def __init__(self, bench: Profilable) -> None:
        self.bench = bench

    def steps(
        self,
        batch: Sequence[int],
        draft_tokens: Sequence[int],
        context_tokens: int | None,
        cell_s: float,
    ) -> StepTimes | None:
        """Time steps of made-up requests."""
        begun_s = perf_counter()
        times = StepProfiler(self.bench, cell_s).measure(batch, draft_tokens, context_tokens)
        self.bench.reset_cache()
        log.info("steps_measured", times=times, took_s=round(perf_counter() - begun_s, 1))
        return times

    def moves(self) -> dict[str, float]:
        """Time what made-up chunks cost to begin and to move."""
        measured = MoveProfiler(self.bench).measure()
        log.info("moves_measured", **measured)
        return measured


def _powers(base: int, end: int) -> Iterator[int]:
    value = 1
    while value < end:
        yield value
        value *= base
    yield end


class StepProfiler:
    """Times whole steps by batch size and draft length, T(B, gamma): random prompts, drafts of no meaning.

    Each cell of the grid is measured for ``cell_s`` seconds at most, if it has its fewest steps by then.
    """

    def __init__(self, bench: Profilable, cell_s: float = inf) -> None:
        self.bench = bench
        self._cell_s = cell_s

    def measure(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes | None:
        """Return the median seconds of a step for each size that fits; None if none does.

        A draft length that no step of the engine has is measured as the next longer one.
        """
        sizes, context_tokens = self.bench.sizes, context_tokens or CONTEXT_TOKENS
        run = sizes.draft_lengths or range(sizes.draft_tokens + 1)
        lengths = sorted(
            {min(each for each in run if each >= n) for n in (0, *draft_tokens) if 0 <= n <= max(run)}
        )
        rows = {}
        for size in sorted(set(batch)):
            if 1 <= size <= sizes.running and self._fits(size, lengths, context_tokens):
                seconds = self._measure_row(size, lengths, context_tokens)
                if seconds is not None:
                    rows[size] = seconds
        if not rows:
            return None
        grown = (STEPS + 2) * len(lengths) // 2  # in the middle of the row
        return StepTimes(tuple(rows), tuple(lengths), tuple(rows.values()), context_tokens + grown)

    def _fits(self, size: int, lengths: Sequence[int], context_tokens: int) -> bool:
        sizes = self.bench.sizes
        # A request at the end, when hardly any draft is accepted.
        tokens = context_tokens + (STEPS + 2) * len(lengths) + 2 * max(lengths)
        blocks = -(-tokens // sizes.block_tokens)
        return (
            size * (1 + max(lengths)) <= sizes.step_tokens
            and size * blocks <= sizes.blocks
            and tokens <= sizes.model_tokens
        )

    def _measure_row(
        self, size: int, lengths: Sequence[int], context_tokens: int
    ) -> tuple[float, ...] | None:
        """Measure all draft lengths on one batch; None if it does not stay together long enough."""
        sizes = self.bench.sizes
        random = np.random.default_rng(size)
        names = [f"measure-{index}" for index in range(size)]
        # SGLang admits a request only if there is KV for most of what it may write.
        tokens = min(sizes.model_tokens, sizes.blocks // size * sizes.block_tokens)
        for name in names:
            prompt = random.integers(0, sizes.vocab, context_tokens).tolist()
            self.bench.add(name, prompt, tokens - context_tokens)
        try:
            cells = [self._measure_cell(size, length) for length in lengths]
        finally:
            self._make_up_drafts(None)
            self.bench.drop(names)
        return tuple(cell for cell in cells if cell is not None) if None not in cells else None

    def _measure_cell(self, size: int, length: int) -> float | None:
        self._make_up_drafts(length)
        wanted = (size, size * (1 + length))
        seconds = []
        for _ in range(TRIES + size):  # the prompts may take several steps
            begun = perf_counter()
            computed = self.bench.step()
            taken = perf_counter() - begun
            if computed == wanted:
                seconds.append(taken)
                enough = len(seconds) >= FEWEST_STEPS and sum(seconds) >= self._cell_s
                if enough or len(seconds) == STEPS:
                    return median(seconds)
        return None

    def _make_up_drafts(self, length: int | None) -> None:
        if self.bench.sizes.draft_tokens:
            self.bench.make_up_drafts(length)


class MoveProfiler:
    """Times the token after a long prompt: computed, cached, fetched from the pool."""

    def __init__(self, bench: Profilable) -> None:
        self.bench = bench
        sizes = bench.sizes
        room = min(MOVED_TOKENS, sizes.model_tokens - 2, (sizes.blocks - 1) * sizes.block_tokens)
        self._blocks = room // sizes.block_tokens

    def measure(self) -> dict[str, float]:
        """Return what it finds out for the ``InstanceInfo``, by field; nothing if not two blocks fit."""
        if self._blocks < 2:
            return {}
        bench, sizes = self.bench, self.bench.sizes
        long, short = self._blocks * sizes.block_tokens, sizes.block_tokens
        prefills, fetches, chunks, longer = [], [], [], []
        for _ in range(ROUNDS):
            # Not seeded: what an earlier start, or another instance, has put may still be in the pool.
            prompt = np.random.default_rng().integers(0, sizes.vocab, long + 1).tolist()
            computed = self._first_token_s(prompt)
            if bench.pooled:
                self._first_token_s(prompt, save=True)
            cached = self._first_token_s(prompt)
            resumed = self._first_token_s(prompt[: short + 1])
            bench.reset_cache()
            if bench.pooled:
                fetches.append((self._first_token_s(prompt) - cached) / long)
                bench.reset_cache()
                bench.forget_saved()
            prefills.append((computed - cached) / long)
            chunks.append(resumed)
            longer.append((cached - resumed) / (long - short))
        found = {"prefill_s_per_token": prefills, "chunk_s_per_token": longer, "fetch_s_per_token": fetches}
        measured = {name: max(0.0, median(each[1:])) for name, each in found.items() if each}
        steps, running = StepProfiler(bench), min(RUNNING, sizes.running)
        alone = steps.measure((1,), (0,))
        full = steps.measure((running,), (0,)) or alone
        bench.reset_cache()
        if alone is not None and full is not None:
            measured["step_s"] = full.at(running, 0)
            measured["chunk_s"] = max(0.0, median(chunks[1:]) - alone.at(1, 0))
        return measured

    def _first_token_s(self, prompt: Sequence[int], *, save: bool = False) -> float:
        """Return how long a request for one token takes; with ``save`` its KV goes to the pool."""
        begun = perf_counter()
        self.bench.add("measure", prompt, 1, save=save)
        while self.bench.busy:
            self.bench.step()
        taken = perf_counter() - begun
        self.bench.drop(["measure"])
        return taken
