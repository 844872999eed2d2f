"""Memory that an instance asleep gives back.

On a CPU it is that of KV.  On a GPU SGLang's memory saver does the work, for the weights too where SGLang
keeps a copy of them in main memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from seer_worker.process.adapter import Rejected
from seer_worker.weights import memory
from sglang.srt.constants import GPU_MEMORY_TYPE_KV_CACHE, GPU_MEMORY_TYPE_WEIGHTS
from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput, ResumeMemoryOccupationReqInput
from torch import Tensor

__all__ = ["release", "resume"]


def release(scheduler: Any, kv_layers: Sequence[Tensor]) -> None:
    """Give an idle scheduler's memory back; on a CPU, that of ``kv_layers``.

    Raises:
        Refusal: it cannot be; nothing has changed.
    """
    if scheduler.device == "cpu":
        for layer in kv_layers:
            memory.release(layer)
    elif not scheduler.server_args.enable_memory_saver:
        raise Rejected("it cannot give memory back; set engine_args = { enable_memory_saver = true }")
    else:
        tags = _tags(scheduler)
        scheduler.weight_updater.release_memory_occupation(ReleaseMemoryOccupationReqInput(tags=tags))


def resume(scheduler: Any, kv_layers: Sequence[Tensor]) -> None:
    """Take the memory again; what KV it holds is none."""
    if scheduler.device == "cpu":
        return
    tags = _tags(scheduler)
    scheduler.weight_updater.resume_memory_occupation(ResumeMemoryOccupationReqInput(tags=tags))
    for layer in kv_layers:
        layer.zero_()  # new memory holds anything, numbers that are not finite too


def _tags(scheduler: Any) -> list[str]:
    kept = scheduler.server_args.enable_weights_cpu_backup
    return [GPU_MEMORY_TYPE_KV_CACHE, *([GPU_MEMORY_TYPE_WEIGHTS] if kept else [])]
