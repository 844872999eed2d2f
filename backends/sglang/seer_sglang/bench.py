"""A SGLang engine as the worker's profilers measure it."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seer_worker.process.drafts import Drafting
from seer_worker.process.meters import Sizes, Step
from seer_worker.process.pooling import PooledRequests

from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob
from seer_sglang.engine import SglangEngine

__all__ = ["SglangBench"]

GROUP = "measure"


class SglangBench:
    """Made-up requests for an idle engine."""

    def __init__(
        self,
        engine: SglangEngine,
        reset_cache: Callable[[], None],
        sizes: Sizes,
        drafting: Drafting | None,
        pool: PooledRequests | None,
    ) -> None:
        self.reset_cache = reset_cache
        self._engine, self._pool = engine, pool
        self._drafting = drafting
        self._added = 0
        self.pooled = pool is not None
        self.sizes = sizes

    def add(self, name: str, prompt: Sequence[int], max_tokens: int, *, save: bool = False) -> None:
        """Queue a request that is sampled at temperature 1, to its last token."""
        self._added += 1
        tokens = list(prompt)
        job = ChunkJob(name, name, GROUP, tokens, len(tokens), max_tokens, Sampling(), self._added, 0)
        self._engine.add(job, GROUP, to_the_end=True, save=save)

    def step(self) -> Step:
        """Make one step; return what it computed."""
        self._engine.step()
        return self._engine.computed

    @property
    def busy(self) -> bool:
        """Whether a request has tokens to write."""
        return bool(self._engine.chunks)

    def drop(self, names: Sequence[str]) -> None:
        """Forget requests, ended or not."""
        self._engine.abort(names)
        self._engine.settle()

    def make_up_drafts(self, tokens: int | None) -> None:
        """Draft so many meaningless tokens for every request, until called with None."""
        if self._drafting is not None:
            self._drafting.made_up = tokens

    def forget_saved(self) -> None:
        """Forget the KV that was saved."""
        if self._pool is not None:
            self._pool.forget_group(GROUP)
