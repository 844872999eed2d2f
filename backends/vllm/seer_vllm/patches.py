"""Changes to vLLM before an engine is made: where a file lies, the text of an error, what is done once."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch
from seer_worker.process.fork_server import unfitness
from seer_worker.process.lone_groups import share_thread
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.executor import multiproc_executor, uniproc_executor

from seer_core.errors import EngineError
from seer_vllm.internals import kv_check

__all__ = ["fork_ranks", "install", "multiply_fp8_in_float32", "register_kernels_once"]

RENDEZVOUS = "get_file_store_init_method"
SOCKETS = "VLLM_RPC_BASE_PATH"
LONGEST_SOCKET_PATH = 107
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"
KERNELS = "register_triton_kernel_overrides"


def install(scratch: Path) -> None:
    """Have the processes of an engine meet in the directory ``scratch``, and report too little KV in bytes.

    vLLM puts the file by which they meet into the temporary directory, and the sockets by which ranks notify
    each other, and never removes them.  Its groups of one process share a thread.
    """
    share_thread()
    if len(os.fsencode(scratch / str(uuid4()))) <= LONGEST_SOCKET_PATH:
        os.environ[SOCKETS] = str(scratch)
    # The name separates engines of this machine, also in shared memory.
    address = f"file://{scratch / scratch.name}"
    for executor in (uniproc_executor, multiproc_executor):
        setattr(executor, RENDEZVOUS, lambda: address)
    check = kv_check()
    setattr(import_module(check.owner), check.name, check_enough_kv)


def register_kernels_once() -> None:
    """Put vLLM's kernels for a CPU in the place of Triton's in this process, and in no fork of it once more.

    For each worker vLLM looks through the attributes of all modules for them.  A module that is imported
    later finds the new ones where they are defined, as it does without a fork.
    """
    current_platform.register_triton_kernel_overrides()
    setattr(type(current_platform), KERNELS, classmethod(lambda _: None))


def fork_ranks() -> None:
    """Have vLLM fork its ranks from this process, which has imported all, if that is safe.

    It does so on a GPU, and starts each anew on a CPU, which it settles with the engine's configuration.
    """
    if current_platform.is_cpu() and unfitness() is None:
        os.environ[START_METHOD] = "fork"


def multiply_fp8_in_float32() -> None:
    """Have products of FP8 matrices computed in float32 from now on, as PyTorch does by itself on most CPUs.

    Where a CPU has AMX, PyTorch leaves them to oneDNN, also where that has only its reference for them: 0.016
    billion products a second instead of 8 (PyTorch 2.13 on a Xeon with AMX and without AMX-FP16).
    """
    scaled: Any = torch._scaled_mm

    def multiply(a: Tensor, b: Tensor, *, scale_a: Tensor, scale_b: Tensor, **others: Any) -> Tensor:
        if scale_a.numel() > 1 or scale_b.numel() > 1 or set(others) != {"out_dtype"}:
            found: Tensor = scaled(a, b, scale_a=scale_a, scale_b=scale_b, **others)
            return found
        return (a.float() @ b.float() * (scale_a * scale_b)).to(others["out_dtype"])

    torch._scaled_mm = multiply  # type: ignore[assignment]


def check_enough_kv(
    available_memory: int,
    get_needed_memory: Callable[[], int],
    max_model_len: int,
    estimate_max_model_len: Callable[[int], int],
) -> None:
    """Refuse KV memory that does not hold one request of ``max_model_len`` tokens; called as vLLM's own is.

    Raises:
        EngineError: it does not; vLLM's own message counts in tenths of GiB.
    """
    needed = get_needed_memory()
    if needed <= available_memory:
        return
    fits = estimate_max_model_len(available_memory) if available_memory > 0 else 0
    raise EngineError(
        f"too little KV memory: a request of max_model_tokens = {max_model_len} takes {needed:,} bytes;"
        f" {max(0, available_memory):,} are there, besides the block that vLLM keeps, and hold {fits} tokens:"
        f" raise kv_cache_bytes by {needed - available_memory:,}, or lower max_model_tokens to {fits}"
    )
