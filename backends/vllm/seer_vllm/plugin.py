"""The plug-in ``vllm``: settings, and instances made from them.  Imports neither vLLM nor torch."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from msgspec import Meta, field
from seer_host.launcher import Launcher
from seer_worker.client.devices import inherited, refuse_arguments, share_devices, worker_environment
from seer_worker.client.fleet import Few, WorkerFleet, WorkerSettings, make_fleet
from seer_worker.client.tokenizer_check import tokenizer_check
from seer_worker.kv_room import fitting_slots, slots

from seer_core.model.sampling import CONTROLS
from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_vllm import KEYED_SERVER
from seer_vllm.doctor import elsewhere, installation, machine
from seer_vllm.drafters import OWN_METHODS

__all__ = ["Settings", "seer_doctor", "seer_make_engines"]

MAX_TEMPERATURE = 2.0
"""vLLM's ``SamplingParams`` refuses more."""

INSTANCE = "seer_vllm.instance:VllmAdapter"
PRELOAD = "seer_vllm.preload:preload"
RUNNER_VARIABLE = "VLLM_USE_V2_MODEL_RUNNER"
"""0 is the first model runner, 1 the second; without it vLLM chooses."""
LORA = "write lora_rank of [engine.vllm]"
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Those for which vLLM makes room."""
SPREAD = "an instance spreads every layer over its devices: write tensor_parallel"

OWN_ENGINE_ARGS = {
    "aux_output_config": "write enable_return_routed_experts of engine_args",
    "async_scheduling": "write async_scheduling of [engine.vllm]",
    "block_size": "write block_size of [engine.vllm]",
    "data_parallel_size": "write instances of [engine.vllm]",
    "decode_context_parallel_size": SPREAD,
    "disable_log_stats": "write metrics of [engine.vllm]",
    "distributed_executor_backend": "it follows from tensor_parallel",
    "dtype": "write dtype of [engine.vllm]",
    "enable_eplb": "vLLM loads new weights of experts to where these were at the start",
    "enable_lora": LORA,
    "enforce_eager": "write enforce_eager of [engine.vllm]",
    "kv_cache_memory_bytes": "write kv_cache_bytes",
    "kv_transfer_config": "name a KV pool in [seer].kv_pool",
    "logits_processors": "keyed sampling calls none; prompts have controls, such as logit_bias",
    "logprobs_mode": "log-probs are those of the model's own distribution",
    "max_cpu_loras": LORA,
    "max_lora_rank": LORA,
    "max_loras": LORA,
    "max_model_len": "write max_model_tokens",
    "max_num_batched_tokens": "write max_batched_tokens",
    "max_num_seqs": "write max_running",
    "model": "write model of [engine.vllm]",
    "nnodes": SPREAD,
    "override_generation_config": "prompts name their sampling, and the model's files the end tokens",
    "pipeline_parallel_size": SPREAD,
    "prefill_context_parallel_size": SPREAD,
    "scheduler_cls": "Seer's accounting needs its own",
    "speculative_config": "enable a drafter in [seer].plugins",
    "tensor_parallel_size": "write tensor_parallel",
    "worker_extension_cls": "keyed sampling needs its own",
}


class Settings(WorkerSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.vllm]``: instances of vLLM, each in a worker process.

    The devices of CUDA_VISIBLE_DEVICES, or else 0, 1, 2, ..., are shared out among the instances, in order.
    """

    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    """The KV cache on each device of an instance. Without it vLLM takes the memory that a GPU has left; on a
    CPU it must be given.
    """
    max_running: Annotated[int, Meta(ge=0)] = 0
    """The most requests that one instance decodes in a step; 0 means as many as suit its KV: 64 to 1,024, and
    64 without ``kv_cache_bytes``.
    """
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 32
    """The tokens of one KV block."""
    max_batched_tokens: Annotated[int, Meta(ge=0)] = 0
    """The most tokens that one step computes; 0 means vLLM's choice."""
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """The type of the model's numbers; ``auto`` means the checkpoint's."""
    threads: Few = 1
    """OpenMP threads on each device of an instance."""
    tensor_parallel: Annotated[int, Meta(ge=1, le=128)] = 1
    """The devices over which one instance spreads the model."""
    runner: Literal["auto", "first", "second"] = "auto"
    """Which of vLLM's model runners computes the steps: ``auto`` is vLLM's own choice, which is the second on
    a GPU, and the first on a CPU and with a drafter.
    """
    async_scheduling: bool | None = None
    """Whether a step is planned while the last one computes; unless it is set, it is on a GPU with the second
    model runner, if there is no drafter and no pool for several ranks.
    """
    enforce_eager: bool | None = None
    """Whether the model runs without CUDA graphs and compilation; unless it is set, it does on a CPU only."""
    uniform_drafts: bool | None = None
    """Whether all drafts of a step have one length, which full CUDA graphs need, and short ones are padded;
    unless it is set, they have it where such graphs are.
    """
    awaited_kv_bytes: Annotated[int, Meta(ge=0)] | None = None
    """With more KV to load from the pool a request waits, and the steps of others go on; up to so much is
    loaded before its first step. KV of running chunks is saved once there is half as much, or 16 MiB. Unless
    it is set, it is 32 MiB.
    """
    lora_rank: Annotated[int, Meta(ge=0, le=512)] = 0
    """The highest rank of an adapter (LoRA) that an instance keeps beside the model; with 0 an update by an
    adapter loads the model's weights once more, with the adapter added to them.
    """
    metrics: bool = False
    """Whether each instance serves vLLM's own figures for Prometheus, at a free port and without a password.
    """
    engine_args: dict[str, Any] = field(default_factory=dict)
    """Further arguments of vLLM's ``EngineArgs``, passed as they are; those that Seer decides are refused."""


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup, launcher: Launcher | None) -> WorkerFleet:
    """Return the instances, not yet started."""
    parallel = settings.tensor_parallel
    return make_fleet(
        "vllm",
        settings,
        startup,
        INSTANCE,
        engine_args(settings, startup.path(settings.model)),
        [
            vllm_environment(inherited(launcher), settings.threads, devices, settings.runner)
            for devices in share_devices("vllm", settings.instances, os.environ, parallel, launcher=launcher)
        ],
        preload=PRELOAD,
        launcher=launcher,
        max_temperature=MAX_TEMPERATURE,
        controls=CONTROLS,
        own_methods=OWN_METHODS,
        keeps_adapters=settings.lora_rank > 0,
        trust_remote_code=bool(settings.engine_args.get("trust_remote_code")),
        skip_tokenizer=bool(settings.engine_args.get("skip_tokenizer_init")),
        takes_images=True,
    )


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for vLLM, and for what the settings need."""
    if settings is None or startup is None:
        return installation()
    checks = installation() if settings.python is None else elsewhere(startup.path(settings.python))
    model = startup.path(settings.model)
    if all(check.ok for check in checks) and model.is_dir():
        checks = [*checks, tokenizer_check("vllm", lambda: seer_make_engines(settings, startup, None))]
    return [
        *checks,
        *machine(
            model,
            settings.instances,
            settings.tensor_parallel,
            settings.threads,
            settings.kv_cache_bytes,
            settings.runner,
            settings.engine_args.get("gpu_memory_utilization"),
        ),
        *slots(
            "vllm",
            model,
            settings.kv_cache_bytes,
            dtype=settings.dtype,
            max_model_tokens=settings.max_model_tokens,
            max_running=max_running(settings, model),
            tensor_parallel=settings.tensor_parallel,
        ),
    ]


def engine_args(settings: Settings, model_dir: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``.

    Raises:
        ConfigError: ``engine_args`` sets what a setting, or Seer itself, already decides.
    """
    refuse_arguments("vllm", settings.engine_args, OWN_ENGINE_ARGS)
    arguments: dict[str, Any] = {
        "model": str(model_dir.absolute()),
        "dtype": settings.dtype,
        "block_size": settings.block_size,
        "max_num_seqs": max_running(settings, model_dir),
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "disable_log_stats": not settings.metrics,
    }
    decided = {
        "async_scheduling": settings.async_scheduling,
        "enforce_eager": settings.enforce_eager,
        "uniform_drafts": settings.uniform_drafts,
        "awaited_kv_bytes": settings.awaited_kv_bytes,
    }
    given = {name: value for name, value in decided.items() if value is not None}
    optional = {
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "max_model_len": settings.max_model_tokens,
        "max_num_batched_tokens": settings.max_batched_tokens,
    }
    chosen = {name: value for name, value in optional.items() if value}
    if settings.lora_rank:
        rank = next(each for each in LORA_RANKS if each >= settings.lora_rank)
        chosen |= {"enable_lora": True, "max_loras": 1, "max_lora_rank": rank}
    return arguments | given | chosen | settings.engine_args


def max_running(settings: Settings, model_dir: Path) -> int:
    """Return the most requests that an instance decodes in a step, as set or as suits its KV."""
    if settings.max_running:
        return settings.max_running
    fitting = fitting_slots(
        model_dir,
        settings.kv_cache_bytes,
        dtype=settings.dtype,
        max_model_tokens=settings.max_model_tokens,
        tensor_parallel=settings.tensor_parallel,
    )
    return min(fitting, settings.max_batched_tokens or fitting)  # a step computes a token of each at least


def vllm_environment(
    environment: Mapping[str, str],
    threads: int,
    devices: Sequence[str] | None,
    runner: Literal["auto", "first", "second"] = "first",
) -> dict[str, str]:
    """Return the environment of a worker, with the engine core in-process and this model runner."""
    decided = ("VLLM_CPU_KVCACHE_SPACE", RUNNER_VARIABLE, KEYED_SERVER)
    # Or else vLLM wants a NUMA node for each rank on a CPU, and gives it as many threads as that has CPUs.
    environment = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", **environment}
    inherited = {name: value for name, value in environment.items() if name not in decided}
    choice = {"first": {RUNNER_VARIABLE: "0"}, "second": {RUNNER_VARIABLE: "1"}, "auto": {}}[runner]
    return worker_environment(
        inherited,
        threads,
        devices,
        NUMBA_NUM_THREADS=str(threads),
        VLLM_ENABLE_V1_MULTIPROCESSING="0",
        VLLM_NO_USAGE_STATS="1",
        **choice,
    )
