"""An instance of SGLang behind whose scheduler an accelerator is emulated."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from msgspec import structs
from seer_sglang.instance import SglangAdapter
from seer_sglang.plugin import FIXED_ENGINE_ARGS
from seer_worker.wire import Start

from seer_paced.checkpoint import write_checkpoint
from seer_paced.emulated_clock import EmulatedClock
from seer_paced.emulation import Emulation
from seer_paced.script import TokenScript
from seer_paced.settings import Settings

if TYPE_CHECKING:
    from seer_sglang.engine import SglangEngine
    from seer_worker.process.pooling import PooledRequests

    from seer_paced.sglang_forward import BatchForward, TimedLayers

__all__ = ["EmulatedSglang", "engine_args"]

HEAD_SIZE = 4
"""Of a layer's only head: a token's keys, bfloat16, are a word of 8 bytes, and so are its values."""


class SglangEmulation(Emulation):
    """An emulation that takes SGLang's batches."""

    def install(self, engine: SglangEngine) -> TimedLayers:
        """Compute the engine's batches from now on; return its KV."""
        from seer_paced.sglang_forward import BatchForward  # imports SGLang

        self._batches: BatchForward = BatchForward(engine, self)
        return self._batches.layers

    def move_beside(self, pooled: PooledRequests) -> None:
        """Emulate what moves beside steps."""
        self._batches.move_beside(pooled)


class EmulatedSglang(SglangAdapter):
    """``seer_sglang``'s instance with an emulated forward pass.

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
        emulation = SglangEmulation(settings, clock, script)
        super().__init__(structs.replace(start, settings=engine_args(settings, model)), emulation)
        if self._pooled is not None:
            emulation.move_beside(self._pooled)


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
        "draft_paths": 1,
    }
