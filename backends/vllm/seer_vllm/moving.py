"""What it costs to take over a request: a token's KV fetched from the pool, against computed again."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from time import perf_counter

import numpy as np
from vllm.inputs.engine import tokens_input
from vllm.v1.engine.llm_engine import LLMEngine

from seer_vllm.connector import StoreConnector
from seer_vllm.scheduler import AccountingScheduler
from seer_vllm.steps import measuring_params

__all__ = ["MoveMeter"]

TOKENS = 1024
"""Context measured, if so much fits: long enough to stand out from a step's fixed cost."""
ROUNDS = 3
"""The first warms up and does not count."""
GROUP = "measure-moving"


class MoveMeter:
    """Times the token after a long prompt on an idle engine: computed, cached, fetched from the pool."""

    def __init__(self, engine: LLMEngine, scheduler: AccountingScheduler, connector: StoreConnector) -> None:
        self._engine = engine
        self._scheduler = scheduler
        self._connector = connector
        config = engine.vllm_config
        self._vocab_size = config.model_config.get_vocab_size()
        blocks = config.cache_config.num_gpu_blocks
        assert blocks is not None
        room = min(TOKENS, config.model_config.max_model_len - 2, (blocks - 2) * connector.block_tokens)
        self._blocks = room // connector.block_tokens

    def measure(self) -> tuple[float, float] | None:
        """Return the seconds per token of prefilling and of fetching; None if not even a block fits."""
        if self._blocks < 1:
            return None
        tokens = self._blocks * self._connector.block_tokens
        prefills, fetches = [], []
        for _ in range(ROUNDS):
            # Not seeded: what an earlier start, or another instance, has put may still be in the pool.
            prompt = np.random.default_rng().integers(0, self._vocab_size, tokens + 1).tolist()
            computed = self._first_token_s(prompt)
            self._first_token_s(prompt, save=True)
            cached = self._first_token_s(prompt)
            self._engine.reset_prefix_cache()
            fetched = self._first_token_s(prompt)
            self._engine.reset_prefix_cache()
            self._connector.forget_group(GROUP)
            prefills.append((computed - cached) / tokens)
            fetches.append((fetched - cached) / tokens)
        return max(0.0, median(prefills[1:])), max(0.0, median(fetches[1:]))

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
