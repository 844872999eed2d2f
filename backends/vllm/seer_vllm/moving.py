"""What it costs to go on with a response: its KV cached here, fetched from the pool, computed again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

from seer_vllm.connector import StoreConnector
from seer_vllm.scheduler import AccountingScheduler
from seer_vllm.steps import StepMeter, measuring_params

__all__ = ["MoveMeter"]

TOKENS = 1024
"""Context measured, if so much fits: long enough to stand out from a step's fixed cost."""
ROUNDS = 3
"""The first warms up and does not count."""
RUNNING = 32
"""Requests of the step that a chunk's end is compared with."""
GROUP = "measure-moving"


class MoveMeter:
    """Times the token after a long prompt on an idle engine: computed, cached, fetched from the pool."""

    def __init__(
        self,
        engine: LLMEngine,
        scheduler: AccountingScheduler,
        steps: StepMeter,
        connector: StoreConnector | None,
    ) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._steps = steps
        self._connector = connector
        config = engine.vllm_config
        self._vocab_size = config.model_config.get_vocab_size()
        self._running = min(RUNNING, config.scheduler_config.max_num_seqs)
        self._block_tokens = config.cache_config.block_size
        blocks = config.cache_config.num_gpu_blocks
        assert blocks is not None
        room = min(TOKENS, config.model_config.max_model_len - 2, (blocks - 2) * self._block_tokens)
        self._blocks = room // self._block_tokens

    def measure(self) -> dict[str, float]:
        """Return what it finds out for the ``InstanceInfo``, by field; nothing if not two blocks fit."""
        if self._blocks < 2:
            return {}
        long, short = self._blocks * self._block_tokens, self._block_tokens
        prefills, fetches, chunks, longer = [], [], [], []
        for _ in range(ROUNDS):
            # Not seeded: what an earlier start, or another instance, has put may still be in the pool.
            prompt = np.random.default_rng().integers(0, self._vocab_size, long + 1).tolist()
            computed = self._first_token_s(prompt)
            if self._connector is not None:
                self._first_token_s(prompt, save=True)
            cached = self._first_token_s(prompt)
            resumed = self._first_token_s(prompt[: short + 1])
            self._engine.reset_prefix_cache()
            if self._connector is not None:
                fetches.append((self._first_token_s(prompt) - cached) / long)
                self._engine.reset_prefix_cache()
                self._connector.forget_group(GROUP)
            prefills.append((computed - cached) / long)
            chunks.append(resumed)
            longer.append((cached - resumed) / (long - short))
        found = {"prefill_s_per_token": prefills, "chunk_s_per_token": longer, "fetch_s_per_token": fetches}
        measured = {name: max(0.0, median(each[1:])) for name, each in found.items() if each}
        alone = self._steps.measure((1,), (0,))
        full = self._steps.measure((self._running,), (0,)) or alone
        self._engine.reset_prefix_cache()
        if alone is not None and full is not None:
            measured["step_s"] = full.at(self._running, 0)
            measured["chunk_s"] = max(0.0, median(chunks[1:]) - alone.at(1, 0))
        return measured

    def _first_token_s(self, prompt: Sequence[int], *, save: bool = False) -> float:
        """Return how long a request for one token takes; with ``save`` its KV goes to the pool."""
        job = {"group": GROUP, "prompt_tokens": len(prompt), "last": False} if save else {}
        params = measuring_params(1, seed=0, **job)
        begun = perf_counter()
        id = self._engine.add_request(GROUP, tokens_input(list(prompt), cache_salt=GROUP), params)
        while self._engine.has_unfinished_requests():
            self._engine.step()
        taken = perf_counter() - begun
        self._scheduler.settle(id)
        return taken
