"""How long a step takes, by batch size and draft length: T(B, gamma), on the engine that will make them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import RequestOutputKind
from vllm.v1.engine.llm_engine import LLMEngine

from seer_core.drafting import StepTimes
from seer_vllm.scheduler import AccountingScheduler

__all__ = ["StepMeter", "default_grid", "measuring_params"]

CONTEXT_TOKENS = 64
"""Prompt of each request where nobody says otherwise."""
STEPS = 12
TRIES = 30
"""Steps made at most for one cell; one that vLLM planned differently, as in a preemption, does not count."""


def default_grid(max_running: int, draft_tokens: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return powers of two for both axes, with both ends, and 0 draft tokens."""
    return (*_powers(max_running),), (0, *_powers(draft_tokens))


def measuring_params(max_tokens: int, **extra_args: Any) -> SamplingParams:
    """Return what a made-up request is sampled by: temperature 1, to its last token."""
    return SamplingParams(
        temperature=1.0,
        max_tokens=max_tokens,
        ignore_eos=True,
        logprobs=0,
        flat_logprobs=True,
        detokenize=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
        extra_args=extra_args,
    )


def _powers(end: int) -> Iterator[int]:
    value = 1
    while value < end:
        yield value
        value *= 2
    yield end


class StepMeter:
    """Times whole steps of an idle engine: random prompts, temperature 1, drafts of no meaning."""

    def __init__(self, engine: LLMEngine, scheduler: AccountingScheduler, drafts: bool) -> None:
        self._engine = engine
        self._scheduler = scheduler
        config = engine.vllm_config
        self._vocab_size = config.model_config.get_vocab_size()
        self._max_model_tokens = config.model_config.max_model_len
        self._max_running = config.scheduler_config.max_num_seqs
        self._max_step_tokens = config.scheduler_config.max_num_batched_tokens
        self._max_draft_tokens = scheduler.num_spec_tokens if drafts else 0
        blocks = config.cache_config.num_gpu_blocks
        assert blocks is not None
        self._block_tokens, self._blocks = config.cache_config.block_size, blocks - 1

    def measure(
        self, batch: Sequence[int], draft_tokens: Sequence[int], context_tokens: int | None = None
    ) -> StepTimes | None:
        """Return the median seconds of a step for each size that fits; None if none does."""
        context_tokens = context_tokens or CONTEXT_TOKENS
        lengths = sorted({n for n in draft_tokens if 0 <= n <= self._max_draft_tokens} | {0})
        rows = {}
        for size in sorted(set(batch)):
            if 1 <= size <= self._max_running and self._fits(size, lengths, context_tokens):
                seconds = self._measure_row(size, lengths, context_tokens)
                if seconds is not None:
                    rows[size] = seconds
        if not rows:
            return None
        grown = (STEPS + 2) * len(lengths) // 2  # in the middle of the row
        return StepTimes(tuple(rows), tuple(lengths), tuple(rows.values()), context_tokens + grown)

    def _tokens(self, lengths: Sequence[int], context_tokens: int) -> int:
        """Return the tokens of a request at the end, when hardly any draft is accepted."""
        return context_tokens + (STEPS + 2) * len(lengths) + 2 * max(lengths)

    def _fits(self, size: int, lengths: Sequence[int], context_tokens: int) -> bool:
        tokens = self._tokens(lengths, context_tokens)
        blocks = -(-tokens // self._block_tokens)
        return (
            size * (1 + max(lengths)) <= self._max_step_tokens
            and size * blocks <= self._blocks
            and tokens <= self._max_model_tokens
        )

    def _measure_row(
        self, size: int, lengths: Sequence[int], context_tokens: int
    ) -> tuple[float, ...] | None:
        """Measure all draft lengths on one batch; None if it does not stay together long enough."""
        random = np.random.default_rng(size)
        names = [f"measure-{index}" for index in range(size)]
        ids = []
        for index, name in enumerate(names):
            params = measuring_params(self._max_model_tokens - context_tokens, seed=index)
            prompt = random.integers(0, self._vocab_size, context_tokens).tolist()
            ids.append(self._engine.add_request(name, tokens_input(prompt), params))
        try:
            cells = [self._measure_cell(size, length) for length in lengths]
        finally:
            self._make_up_drafts(None)
            self._engine.abort_request(names)
            for id in ids:
                self._scheduler.settle(id)
        return tuple(cell for cell in cells if cell is not None) if None not in cells else None

    def _measure_cell(self, size: int, length: int) -> float | None:
        self._make_up_drafts(length)
        wanted = (size, size * (1 + length))
        seconds = []
        for _ in range(TRIES + size):  # the prompts may take several steps
            begun = perf_counter()
            self._engine.step()
            taken = perf_counter() - begun
            if self._scheduler.scheduled == wanted:
                seconds.append(taken)
                if len(seconds) == STEPS:
                    return median(seconds)
        return None

    def _make_up_drafts(self, length: int | None) -> None:
        if self._max_draft_tokens:
            self._engine.collective_rpc("seer_make_up_drafts", args=(length,))
