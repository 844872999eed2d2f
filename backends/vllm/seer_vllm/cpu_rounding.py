"""Rounding on a CPU that does not depend on what else a step computes.

A position is computed alone in one schedule, and in another again with those before it.  vLLM's attention
adds up a long context in parts, in some steps and not in others, and on CPUs with AMX a product of 16-bit
matrices is rounded otherwise for one row than for many.  Without both, a layer has the same bits in any step.
"""

from __future__ import annotations

import os

import torch

__all__ = ["install"]

SPLIT_CONTEXTS = "VLLM_CPU_ATTN_SPLIT_KV"
HIGHEST_SET = "ONEDNN_MAX_CPU_ISA"
WITHOUT_AMX = "AVX512_CORE_BF16"


def install() -> None:
    """Leave both out in this process, before it computes anything, unless its environment wants them."""
    os.environ.setdefault(SPLIT_CONTEXTS, "0")
    os.environ.setdefault(HIGHEST_SET, WITHOUT_AMX)
    if "AMX" not in os.environ[HIGHEST_SET]:
        torch.cpu._is_amx_tile_supported = lambda: False  # vLLM asks it wherever it has a kernel for AMX
