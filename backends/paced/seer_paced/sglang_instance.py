"""An instance of SGLang behind whose scheduler an accelerator is emulated."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
from seer_sglang.instance import SglangAdapter
from seer_sglang.plugin import FIXED_ENGINE_ARGS
from seer_worker.wire import Start

from seer_paced.checkpoint import write_checkpoint
from seer_paced.emulated_clock import EmulatedClock
from seer_paced.emulation import EmulatedSteps, Emulation
from seer_paced.script import TokenScript
from seer_paced.settings import Settings

if TYPE_CHECKING:
    from seer_worker.process.pooling import PooledRequests

    from seer_core.ports.kv import KVStore
    from seer_paced.sglang_forward import TimedLayers

__all__ = ["EmulatedSglang", "engine_args"]

HEAD_SIZE = 4
"""Of a layer's only head: a token's keys, bfloat16, are a word of 8 bytes, and so are its values."""


class EmulatedSglang(EmulatedSteps, SglangAdapter):
    """``seer_sglang``'s instance with emulated steps.

    Args:
        start: its settings are those of ``[engine.paced]``.
        clock: as ``Emulation`` takes it, like the argument that follows.
        script: likewise.
    """

    def __init__(
        self, start: Start, clock: EmulatedClock | None = None, script: TokenScript | None = None
    ) -> None:
        settings = msgspec.convert(start.settings, Settings)
        model = write_checkpoint(
            Path(start.scratch, "model"), settings.vocab_size, settings.max_model_tokens, HEAD_SIZE
        )
        self.emulation = Emulation(settings, clock, script)
        SglangAdapter.__init__(self, structs.replace(start, settings=engine_args(settings, model)))
        self.emulate(start)
        from seer_paced.sglang_forward import BatchForward  # imports SGLang

        self._batches: BatchForward = BatchForward(self.engine, self.emulation)

    def share_kv(
        self, open_store: Callable[[int, int], KVStore], report: Callable[[str], None]
    ) -> PooledRequests:
        """Share KV, whose copies take emulated time."""
        pooled = super().share_kv(open_store, report)
        self._batches.move_beside(pooled)
        return pooled

    def _kv(self) -> TimedLayers:
        return self._batches.layers


def engine_args(settings: Settings, model: Path) -> dict[str, Any]:
    """Return the arguments of SGLang's ``ServerArgs``, and what ``seer_sglang`` takes beside them."""
    page = settings.block_tokens
    return {
        **FIXED_ENGINE_ARGS,
        "model_path": str(model.absolute()),
        "load_format": "dummy",
        "dtype": "bfloat16",
        "page_size": page,
        "max_running_requests": settings.max_running,
        "max_total_tokens": settings.kv_capacity_tokens + 2 * page,  # what seer_sglang does not promise
        "max_prefill_tokens": settings.max_batched_tokens,
        "chunked_prefill_size": settings.max_batched_tokens,
        "mem_fraction_static": 0.5,  # by default SGLang keeps 1.5 MB for each of those tokens
        "context_length": settings.max_model_tokens,
        "disable_cuda_graph": True,
        "kv_cache_bytes": None,
        "awaited_kv_bytes": None,
        "draft_paths": 1,
    }
