"""The plug-in ``sglang``: settings, and instances made from them.  Imports neither SGLang nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs
from seer_host.fleet import Few, WorkerFleet, WorkerSettings, make_fleet

from seer_core.errors import ConfigError
from seer_core.hookspecs import Check, Startup, hookimpl
from seer_sglang.doctor import beside, installation, interpreter, machine

__all__ = ["Settings", "seer_doctor", "seer_make_engines"]

INSTANCE = "seer_sglang.instance:Instance"

OWN_ENGINE_ARGS = {
    "attention_backend": "on a CPU only one will do",
    "context_length": "write max_model_tokens",
    "device": "it follows from what is installed",
    "disable_cuda_graph": "write enforce_eager of [engine.sglang]",
    "disable_overlap_schedule": "Seer needs it so",
    "disable_radix_cache": "chunks would be prefilled again and again",
    "dp_size": "write instances of [engine.sglang]",
    "dtype": "write dtype of [engine.sglang]",
    "enable_hierarchical_cache": "name a KV pool in [seer].kv_pool",
    "enable_lmcache": "name a KV pool in [seer].kv_pool",
    "max_prefill_tokens": "write max_batched_tokens",
    "max_running_requests": "write max_running",
    "model_path": "write model of [engine.sglang]",
    "page_size": "write block_size of [engine.sglang]",
    "radix_cache_backend": "name a KV pool in [seer].kv_pool",
    "sampling_backend": "keyed sampling needs its own",
    "skip_tokenizer_init": "Seer has the tokenizer",
    "speculative_algorithm": "enable a drafter in [seer].plugins",
    "tp_size": "an instance has one device",
}


class Settings(WorkerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.sglang]``, besides what every engine on the host has.

    ``kv_cache_bytes`` and ``threads`` (OpenMP's) are per instance.  Without ``kv_cache_bytes`` SGLang takes
    what a GPU has left; on a CPU it must be given.  ``block_size`` is SGLang's page.  Drafts are trees of up
    to ``draft_paths`` paths.  ``max_batched_tokens`` bounds a step's prefill; 0 means SGLang's choice.
    The devices of CUDA_VISIBLE_DEVICES, or else 0, 1, 2, ..., are shared out among the instances, in order.
    Without ``python`` the workers run under this interpreter if SGLang is installed here, and else under the
    one that ``make setup-sglang`` has made.  ``engine_args`` are passed to SGLang's ``ServerArgs`` as they
    are.
    """

    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    max_batched_tokens: Annotated[int, Meta(ge=0)] = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Few = 1
    draft_paths: Annotated[int, Meta(ge=1, le=64)] = 4
    enforce_eager: bool = True
    engine_args: dict[str, Any] = field(default_factory=dict)


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup) -> WorkerFleet:
    """Return the instances, not yet started."""
    python = settings.python or interpreter()
    if python is None:
        raise ConfigError(
            f"engine.sglang: SGLang is neither here nor in {beside()}; run `make setup-sglang`, or name in"
            " [engine.sglang].python an interpreter that has it"
        )
    return make_fleet(
        "sglang",
        structs.replace(settings, python=python),
        startup,
        INSTANCE,
        engine_args(settings, startup.path(settings.model)),
        [
            worker_environment(os.environ, settings.threads, device)
            for device in share_devices(settings, os.environ)
        ],
    )


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for SGLang, and for what the settings need."""
    if settings is None or startup is None:
        return installation(interpreter())
    python = interpreter() if settings.python is None else str(startup.path(settings.python))
    model = startup.path(settings.model)
    checks = machine(model, settings.instances, settings.threads, settings.kv_cache_bytes)
    return installation(python) + checks


def engine_args(settings: Settings, model_dir: Path) -> dict[str, Any]:
    """Return the arguments of SGLang's ``ServerArgs``, and ``kv_cache_bytes``.

    Raises:
        ConfigError: ``engine_args`` sets what a setting, or Seer itself, already decides, or a step would end
            within a block.
    """
    for name, why in OWN_ENGINE_ARGS.items():
        if name in settings.engine_args:
            raise ConfigError(f"engine.sglang.engine_args.{name} cannot be set: {why}")
    if settings.max_batched_tokens % settings.block_size:
        raise ConfigError(
            f"engine.sglang: max_batched_tokens = {settings.max_batched_tokens} is no multiple of"
            f" block_size = {settings.block_size}; a step prefills whole blocks"
        )
    arguments: dict[str, Any] = {
        "model_path": str(model_dir.absolute()),
        "dtype": settings.dtype,
        "page_size": settings.block_size,
        "max_running_requests": settings.max_running,
        "disable_cuda_graph": settings.enforce_eager,
        "disable_overlap_schedule": True,
        "skip_tokenizer_init": True,
        "random_seed": 0,
        "log_level": "warning",
        "draft_paths": settings.draft_paths,
    }
    optional = {
        "context_length": settings.max_model_tokens,
        "max_prefill_tokens": settings.max_batched_tokens,
        "chunked_prefill_size": settings.max_batched_tokens,
    }
    return (
        arguments
        | {name: value for name, value in optional.items() if value}
        | settings.engine_args
        | {"kv_cache_bytes": settings.kv_cache_bytes}
    )


def share_devices(settings: Settings, environment: Mapping[str, str]) -> Sequence[str]:
    """Return each instance's device; no name where none is visible.

    Raises:
        ConfigError: there are too few.
    """
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    if inherited is None:
        devices = [str(index) for index in range(settings.instances)]
    elif inherited.strip() in ("", "-1"):
        return [""] * settings.instances
    else:
        devices = inherited.split(",")
    if len(devices) < settings.instances:
        raise ConfigError(
            f"engine.sglang: {settings.instances} instances need a device each, visible are {len(devices)};"
            " lower instances"
        )
    return devices[: settings.instances]


def worker_environment(environment: Mapping[str, str], threads: int, device: str) -> dict[str, str]:
    """Return the environment of a worker: offline, with so many threads, on this device."""
    return dict(environment) | {
        "CUDA_VISIBLE_DEVICES": device,
        "HF_HUB_OFFLINE": "1",
        "OMP_NUM_THREADS": str(threads),
        "TRANSFORMERS_OFFLINE": "1",
    }
