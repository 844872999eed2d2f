"""The plug-in ``sglang``: settings, and instances made from them.  Imports neither SGLang nor torch."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field, structs
from seer_host.launcher import Launcher
from seer_worker.client.devices import inherited, refuse_arguments, share_devices, worker_environment
from seer_worker.client.fleet import Few, WorkerFleet, WorkerSettings, make_fleet
from seer_worker.client.tokenizer_check import tokenizer_check
from seer_worker.kv_room import fitting_slots, slots
from seer_worker.machine import machine

from seer_core.errors import ConfigError
from seer_core.model.sampling import CONTROLS
from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_sglang.doctor import PART, SETUP, beside, installation, interpreter

__all__ = ["Settings", "seer_doctor", "seer_make_engines"]

INSTANCE = "seer_sglang.instance:SglangAdapter"

GROUPS = (
    "an instance is one group of ranks: write instances of [engine.sglang], or keep servers of SGLang's own"
    " ([engine.remote])"
)
PREPARED = "images are made ready as the model's own files say"
OWN_ENGINE_ARGS = {
    "attention_backend": "on a CPU only one will do",
    "attn_dp_size": GROUPS,
    "context_length": "write max_model_tokens",
    "device": "it follows from what is installed",
    "disable_cuda_graph": "write enforce_eager of [engine.sglang]",
    "disable_fast_image_processor": PREPARED,
    "disable_overlap_schedule": "Seer needs it so",
    "disable_radix_cache": "chunks would be prefilled again and again",
    "dp_size": "write instances of [engine.sglang]",
    "dtype": "write dtype of [engine.sglang]",
    "enable_dp_attention": GROUPS,
    "enable_hierarchical_cache": "name a KV pool in [seer].kv_pool",
    "enable_metrics": "write metrics of [engine.sglang]",
    "enable_lmcache": "name a KV pool in [seer].kv_pool",
    "image_processor_backend": PREPARED,
    "max_prefill_tokens": "write max_batched_tokens",
    "max_running_requests": "write max_running",
    "mm_process_config": PREPARED,
    "model_path": "write model of [engine.sglang]",
    "page_size": "write block_size of [engine.sglang]",
    "pp_size": "an instance spreads over devices by tensor_parallel alone",
    "radix_cache_backend": "name a KV pool in [seer].kv_pool",
    "sampling_backend": "keyed sampling needs its own",
    "skip_tokenizer_init": "Seer has the tokenizer",
    "speculative_algorithm": "enable a drafter in [seer].plugins",
    "tp_size": "write tensor_parallel of [engine.sglang]",
}


FIXED_ENGINE_ARGS = {
    "disable_overlap_schedule": True,
    "skip_tokenizer_init": True,
    "random_seed": 0,
    "log_level": "warning",
}
"""Arguments that every instance of SGLang has."""


class Settings(WorkerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.sglang]``: instances of SGLang, each in a worker process and one for each further device.

    The devices of CUDA_VISIBLE_DEVICES, or else 0, 1, 2, ..., are shared out among the instances, in order.
    Without ``python`` the workers run under this interpreter if SGLang is installed here, and else under the
    one that ``make setup-sglang`` has made.
    """

    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """The KV cache on each device of an instance. Without it SGLang takes the memory that a GPU has left; on
    a CPU it must be given.
    """
    max_running: Annotated[int, Meta(ge=0)] = 0
    """The most requests that one instance decodes in a step; 0 means as many as suit its KV: 64 to 1,024, and
    64 without ``kv_cache_bytes``.
    """
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 1
    """The tokens of one KV block, SGLang's page."""
    max_batched_tokens: Annotated[int, Meta(ge=0)] = 0
    """The most tokens that one step prefills, a multiple of ``block_size``; 0 means SGLang's choice."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the model's numbers; ``auto`` means the checkpoint's."""
    threads: Few = 1
    """OpenMP threads on each device of an instance."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=128)] = 1
    """The devices over which one instance spreads the model."""
    draft_paths: Annotated[int, Meta(ge=1, le=64)] = 4
    """The most paths of a draft, which is a tree."""
    enforce_eager: bool | None = None
    """Whether the model runs without CUDA graphs; unless it is set, it does on a CPU only."""
    uniform_drafts: bool | None = None
    """Whether all steps have draft trees of one size, which CUDA graphs need, and small ones are padded;
    unless it is set, they have it where such graphs are.
    """
    awaited_kv_bytes: Annotated[int, Meta(ge=0)] | None = None
    """With more KV to load from the pool a request waits, and the steps of others go on; up to so much is
    loaded before its first step. KV of running chunks is saved once there is half as much, or 16 MiB. Unless
    it is set, it is 32 MiB.
    """
    metrics: bool = False
    """Whether each instance serves the figures of SGLang's scheduler for Prometheus, at a free port and
    without a password.
    """
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of SGLang's ``ServerArgs``, passed as they are; those that Seer decides are refused.
    """


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup, launcher: Launcher | None) -> WorkerFleet:
    """Return the instances, not yet started."""
    python = settings.python or interpreter()
    if python is None:
        raise ConfigError(
            f"engine.sglang: SGLang is neither here nor in {beside()}; {SETUP}, or name in"
            " [engine.sglang].python an interpreter that has it"
        )
    return make_fleet(
        "sglang",
        structs.replace(settings, python=python),
        startup,
        INSTANCE,
        engine_args(settings, startup.path(settings.model)),
        [
            worker_environment(inherited(launcher), settings.threads, device)
            for device in share_devices(
                "sglang", settings.instances, os.environ, settings.tensor_parallel, launcher=launcher
            )
        ],
        preload="seer_sglang.preload:preload",
        launcher=launcher,
        controls=CONTROLS,
        takes_images=True,
        trust_remote_code=bool(settings.engine_args.get("trust_remote_code")),
    )


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for SGLang, and for what the settings need."""
    if settings is None or startup is None:
        return installation(interpreter())
    python = interpreter() if settings.python is None else str(startup.path(settings.python))
    model = startup.path(settings.model)
    spin = "threads that wait for a CPU spin"
    devices = settings.tensor_parallel
    checks = machine(
        PART, model, settings.instances, settings.threads, settings.kv_cache_bytes, spin, devices
    )
    room = slots(
        PART,
        model,
        settings.kv_cache_bytes,
        dtype=settings.dtype,
        max_model_tokens=settings.max_model_tokens,
        max_running=max_running(settings, model),
        tensor_parallel=devices,
        every_layer=True,
    )
    there = installation(python)
    if all(check.ok for check in there) and model.is_dir():
        there.append(tokenizer_check(PART, lambda: seer_make_engines(settings, startup, None)))
    return there + checks + room


def max_running(settings: Settings, model_dir: Path) -> int:
    """Return the most requests that an instance decodes in a step, as set or as suits its KV."""
    return settings.max_running or fitting_slots(
        model_dir,
        settings.kv_cache_bytes,
        dtype=settings.dtype,
        max_model_tokens=settings.max_model_tokens,
        tensor_parallel=settings.tensor_parallel,
        every_layer=True,  # by which ``server_args`` counts tokens
    )


def engine_args(settings: Settings, model_dir: Path) -> dict[str, Any]:
    """Return the arguments of SGLang's ``ServerArgs``, and what the worker takes beside them.

    Raises:
        ConfigError: ``engine_args`` sets what a setting, or Seer itself, already decides, or a step would end
            within a block.
    """
    refuse_arguments("sglang", settings.engine_args, OWN_ENGINE_ARGS)
    if settings.max_batched_tokens % settings.block_size:
        raise ConfigError(
            f"engine.sglang: max_batched_tokens = {settings.max_batched_tokens} is no multiple of"
            f" block_size = {settings.block_size}; a step prefills whole blocks"
        )
    arguments: dict[str, Any] = {
        **FIXED_ENGINE_ARGS,
        "model_path": str(model_dir.absolute()),
        "dtype": settings.dtype,
        "page_size": settings.block_size,
        "tp_size": settings.tensor_parallel,
        "max_running_requests": max_running(settings, model_dir),
        "draft_paths": settings.draft_paths,
        "enable_metrics": settings.metrics,
    }
    decided = {
        "disable_cuda_graph": settings.enforce_eager,
        "uniform_drafts": settings.uniform_drafts,
        "awaited_kv_bytes": settings.awaited_kv_bytes,
    }
    optional = {
        "context_length": settings.max_model_tokens,
        "max_prefill_tokens": settings.max_batched_tokens,
        "chunked_prefill_size": settings.max_batched_tokens,
    }
    return (
        arguments
        | {name: value for name, value in decided.items() if value is not None}
        | {name: value for name, value in optional.items() if value}
        | settings.engine_args
        | {"kv_cache_bytes": settings.kv_cache_bytes}
    )
