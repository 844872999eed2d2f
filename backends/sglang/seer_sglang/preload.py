"""The imports of an instance of SGLang, for a process that is forked into instances.

On a CPU they are all that an instance imports.  Where there is a GPU, SGLang and its kernels ask for its name
and kind as they are imported.  That makes a CUDA context, which a fork cannot use.  So there only the
libraries are imported, which take four fifths of the time, and an instance imports SGLang itself.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version

import structlog

from seer_sglang import internals
from seer_sglang.doctor import STANDIN

__all__ = ["LIBRARIES", "OWN", "SGLANG", "preload"]

log = structlog.get_logger("seer")

OWN = (
    "seer_sglang.bench",
    "seer_sglang.instance",
    "seer_sglang.engine",
    "seer_sglang.sleeping",
    "seer_sglang.weights",
)
"""All of this package, most of which imports SGLang, and with it what SGLang imports at once."""

_HOOKS = (
    "attention",
    "cp_tp_group_sharing",
    "cuda_graph",
    "dllm",
    "expert_pack",
    "hicache",
    "kv_shard",
    "layernorm_sp",
    "mamba",
    "mega_moe",
    "memory",
    "model",
    "model_path",
    "moe",
    "muse_spark",
    "parallel",
    "pd_disaggregation",
    "platform",
    "serving",
    "speculative",
)
_COMMUNICATORS = (
    "custom_all_reduce",
    "hpu_communicator",
    "pcie_ipc_ar",
    "pymscclpp",
    "shm_broadcast",
    "torch_symm_mem",
    "xpu_communicator",
)

SGLANG = (
    "sglang.srt.models.registry",  # all models
    "sglang.srt.arg_groups.pipeline",
    "sglang.srt.arg_groups.boundary_reduction",
    *(f"sglang.srt.arg_groups.{name}_hook" for name in _HOOKS),
    *(f"sglang.srt.distributed.device_communicators.{name}" for name in _COMMUNICATORS),
    "sglang.srt.dllm.algorithm",
    "sglang.srt.layers.attention.qsa.config",
    "sglang.srt.mem_cache.prefill_budget",
    "sglang.srt.mem_cache.rust_tree_core.adapter",
    "sglang.srt.speculative.external_corpus_manager",
)
"""What SGLang imports only when an engine is made."""

LIBRARIES = (
    "torch._inductor.compile_fx",
    "torch.distributed.tensor",
    "torch.profiler._cupti_monitor",
    "multiprocessing.synchronize",
    "transformers.activations",
    "transformers.modeling_gguf_pytorch_utils",
    "transformers.modeling_layers",
    "aiohttp",
    "compressed_tensors.config",
    "fastapi",
    "openai.types.responses",
    "prometheus_client",
    "triton",
    "seer_worker.process.adapter",
    "seer_worker.process.selftest",
)
"""What takes time to import, and asks for no device."""


def preload() -> None:
    """Import what an instance will need; start no thread, use no device.

    Raises:
        EngineError: there are no kernels that SGLang can use, or it is not the version it has to be.
    """
    on_cpu = _has_standin()
    if on_cpu:
        internals.check_kernels()  # before anything else: torchvision needs an operator of the stand-in's
    _import(LIBRARIES)
    if on_cpu:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of what is not there without a GPU
            _import((*OWN, *SGLANG))
        internals.check_imports()


def _has_standin() -> bool:
    """Return whether SGLang's kernels are stood in for, without importing them."""
    try:
        version(STANDIN)
    except PackageNotFoundError:
        return False
    return True


def _import(modules: Iterable[str]) -> None:
    for module in modules:
        try:
            import_module(module)
        except ImportError as error:  # an instance, which needs not all of them, says so if it does
            log.warning("not_preloaded", module=module, reason=str(error))
