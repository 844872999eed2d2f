"""The imports of an instance of vLLM, and what each does alike, for a process that is forked into instances.

vLLM imports many of its modules only while an engine starts.  Those named here start no thread, which a fork
would not have, and open no device, which it could not use.  Modules that do, as ``flashinfer`` does when it
is imported, are left to the instance.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import Any

import structlog
from seer_worker.process.names import complain, flaw_of

from seer_vllm import internals

__all__ = ["ARCHITECTURES", "preload"]

log = structlog.get_logger("seer")

ANYWHERE = (
    "seer_vllm.instance",
    "seer_vllm.extension",
    "seer_worker.process.selftest",
    "vllm.distributed.elastic_ep.elastic_execute",
    "vllm.model_executor.layers.quantization.online.base",
    "vllm.renderers.hf",
    "vllm.v1.pool.flash_maxsim",
    "vllm.v1.spec_decode.custom_class_proposer",
    "vllm.v1.worker.gpu.model_runner",
)
"""Modules that bring along all others which vLLM has imported once an engine is ready."""
ON_CPU = (
    "seer_vllm.cpu_attention",
    "seer_vllm.cpu_delta_nets",
    "seer_vllm.cpu_experts",
    "vllm.v1.attention.backends.cpu_attn",
    "vllm.v1.worker.cpu_worker",
)
"""The same, on a CPU."""
ON_DEVICE = ("vllm.v1.attention.backends.flash_attn", "vllm.v1.worker.gpu_worker")
"""The same, elsewhere."""
ARCHITECTURES = ("LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM", "Qwen3MoeForCausalLM")
"""Kinds of models whose classes are imported; the class of another one is imported by the instance."""


def preload() -> None:
    """Import what an instance needs, and do what vLLM does alike for each; start no thread, use no device.

    Raises:
        EngineError: this vLLM lacks a name that is needed for it.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # vLLM looks at names that PyTorch deprecates
        complain(internals.ENGINE, (flaw for name in internals.PRELOADED if (flaw := flaw_of(name))))
        _preload()


def _preload() -> None:
    from vllm.config.logging import LoggingConfig
    from vllm.logger import configure_logging_if_needed
    from vllm.platforms import current_platform

    from seer_vllm import patches

    plugins: Any = import_module("vllm.plugins")
    plugins.load_general_plugins()
    for module in (*ANYWHERE, *(ON_CPU if current_platform.is_cpu() else ON_DEVICE)):
        try:
            import_module(module)
        except ImportError as error:  # an instance, which needs not all of them, says so if it does
            log.warning("not_preloaded", module=module, reason=str(error))
    _register_models()
    patches.register_kernels_once()
    configure_logging_if_needed(LoggingConfig())  # the more has been imported, the longer it takes
    capability: Any = current_platform.get_device_capability
    if hasattr(capability, "cache_clear"):
        capability.cache_clear()  # an instance may see another device


def _register_models() -> None:
    """Give vLLM the classes of common models, which it would inspect in yet another process."""
    from vllm.model_executor.models import ModelRegistry

    for name in ARCHITECTURES:
        try:
            ModelRegistry.register_model(name, ModelRegistry.models[name].load_model_cls())
        except (ImportError, KeyError) as error:
            log.warning("not_preloaded", module=name, reason=str(error))
