"""An instance of vLLM behind whose scheduler an accelerator is emulated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from msgspec import structs
from seer_vllm.instance import VllmAdapter
from seer_worker.process.drafts import check_source
from seer_worker.wire import Start

from seer_core.errors import EngineError
from seer_paced.checkpoint import write_checkpoint
from seer_paced.emulated_clock import EmulatedClock
from seer_paced.emulation import EmulatedSteps, Emulation
from seer_paced.script import TokenScript
from seer_paced.settings import Settings, block_bytes

__all__ = ["EmulatedVllm", "engine_args"]


class EmulatedVllm(EmulatedSteps, VllmAdapter):
    """``seer_vllm``'s instance with emulated steps.

    Args:
        start: its settings are those of ``[engine.paced]``.
        clock: as ``Emulation`` takes it, like the argument that follows.
        script: likewise.
    """

    def __init__(
        self, start: Start, clock: EmulatedClock | None = None, script: TokenScript | None = None
    ) -> None:
        settings = msgspec.convert(start.settings, Settings)
        emulation = Emulation(settings, clock, script)
        model = write_checkpoint(Path(start.scratch, "model"), settings.vocab_size, settings.max_model_tokens)
        if start.source is not None:
            check_source(start.source, ())  # no method of vLLM's own: these want a model runner
        if start.source is not None and not emulation.script.has_text:
            raise EngineError(
                "drafts of made-up text mean nothing: name a recorded text in [engine.paced].script, or drop"
                " the drafter from [seer].plugins"
            )
        arguments = engine_args(settings, model) | {"additional_config": emulation}
        copied_bytes = round(emulation.cost.kv_bytes_per_token) * settings.block_tokens
        self.emulation = emulation
        VllmAdapter.__init__(self, structs.replace(start, settings=arguments), copied_bytes)
        self.emulate(start)

    def close(self) -> None:
        """Give its memory back, which vLLM would keep until the process ends."""
        super().close()
        self.engine.engine_core.shutdown()


def engine_args(settings: Settings, model: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``: its scheduler, our worker, no tokenizer, no weights."""
    blocks = settings.kv_capacity_tokens // settings.block_tokens + 1  # the first is vLLM's null block
    awaited_bytes = settings.awaited_kv_bytes
    awaited = {} if awaited_bytes is None else {"awaited_kv_bytes": awaited_bytes}
    return awaited | {
        "model": str(model.absolute()),
        "skip_tokenizer_init": True,
        "load_format": "dummy",
        "dtype": "bfloat16",
        "block_size": settings.block_tokens,
        "max_num_seqs": settings.max_running,
        "max_num_batched_tokens": settings.max_batched_tokens,
        "max_model_len": settings.max_model_tokens,
        "kv_cache_memory_bytes": blocks * block_bytes(settings.block_tokens),
        "distributed_executor_backend": "uni",
        "enforce_eager": True,
        "uniform_drafts": settings.uniform_drafts,
        "worker_cls": "seer_paced.vllm_worker.EmulatedWorker",
    }
