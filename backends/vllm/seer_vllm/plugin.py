"""The plug-in ``vllm``: settings, and instances made from them.  Imports neither vLLM nor torch."""

from __future__ import annotations

import os
import secrets
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import attrs
import msgspec
from msgspec import Meta, Struct
from seer_host.engine import Launch, WorkerEngine
from seer_host.local import LocalLauncher
from seer_host.tokenizer import ModelTokenizer

from seer_core.clock import RealClock
from seer_core.errors import ConfigError
from seer_core.hookspecs import Check, Startup, hookimpl
from seer_core.labels import InstanceLabels, labels_of
from seer_core.numbers import Seconds
from seer_core.ports import Clock, ModelInfo
from seer_core.reading import UNREADABLE, flaw
from seer_vllm.doctor import installation, machine
from seer_vllm.drafters import OWN_METHODS

__all__ = ["Settings", "VllmFleet", "seer_doctor", "seer_make_engines"]

Positive = Annotated[int, Meta(ge=1)]
Few = Annotated[int, Meta(ge=1, le=10_000)]

MAX_TEMPERATURE = 2.0
"""vLLM's ``SamplingParams`` refuses more."""

INSTANCE = "seer_vllm.instance:Instance"
SPREAD = 'spreads its KV over {} devices, which pools cannot share yet; set [seer].kv_pool = "none"'

OWN_ENGINE_ARGS = {
    "async_scheduling": "Seer needs it off",
    "block_size": "write block_size of [engine.vllm]",
    "disable_log_stats": "Seer has telemetry of its own",
    "distributed_executor_backend": "it follows from tensor_parallel",
    "dtype": "write dtype of [engine.vllm]",
    "enforce_eager": "write enforce_eager of [engine.vllm]",
    "kv_cache_memory_bytes": "write kv_cache_bytes",
    "kv_transfer_config": "name a KV pool in [seer].kv_pool",
    "max_model_len": "write max_model_tokens",
    "max_num_batched_tokens": "write max_batched_tokens",
    "max_num_seqs": "write max_running",
    "model": "write model of [engine.vllm]",
    "scheduler_cls": "Seer's accounting needs its own",
    "speculative_config": "enable a drafter in [seer].plugins",
    "tensor_parallel_size": "write tensor_parallel",
    "worker_extension_cls": "keyed sampling needs its own",
}


NAME_A_MODEL = "give a directory with a Hugging Face model's files; nothing is downloaded"


class TextConfig(Struct, frozen=True):
    """What is needed of a language model's ``config.json``."""

    vocab_size: Positive | None = None
    max_position_embeddings: Positive | None = None


class ModelConfig(TextConfig, frozen=True):
    """The same, of a model that may see as well."""

    text_config: TextConfig | None = None


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[engine.vllm]``.

    ``model`` is a directory, relative to the config file.  ``kv_cache_bytes``, ``threads`` (OpenMP's)
    and ``tensor_parallel`` are per instance.  Without ``kv_cache_bytes`` vLLM takes what a GPU has left; on
    a CPU it must be given.  ``max_model_tokens`` 0 means the model's own limit, ``max_batched_tokens`` 0
    vLLM's choice.  ``visible_devices`` are shared out among the instances, in order; empty means those
    of CUDA_VISIBLE_DEVICES, or else 0, 1, 2, ...  ``engine_args`` are passed to vLLM as they are.
    Without ``log_dir`` the workers' logs go to a temporary directory and stay only if something goes
    wrong.  An instance that says nothing for ``silence_timeout_s`` while it has chunks counts as lost.
    Placers see ``labels``, one table for all instances or a list with one for each.
    """

    model: str
    instances: Few = 1
    kv_cache_bytes: Annotated[int, Meta(ge=1 << 20)] | None = None
    block_size: Annotated[int, Meta(ge=1, le=1024)] = 32
    max_model_tokens: Annotated[int, Meta(ge=0)] = 0
    max_running: Positive = 64
    max_batched_tokens: Annotated[int, Meta(ge=0)] = 0
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    threads: Few = 1
    tensor_parallel: Annotated[int, Meta(ge=1, le=128)] = 1
    visible_devices: tuple[str, ...] = ()
    enforce_eager: bool = True
    start_timeout_s: Seconds = 180.0
    stop_timeout_s: Seconds = 10.0
    control_timeout_s: Seconds = 120.0
    silence_timeout_s: Seconds = 300.0
    report_interval_s: Seconds = 0.2
    log_dir: str | None = None
    engine_args: dict[str, Any] = {}
    labels: InstanceLabels = {}


@attrs.frozen
class VllmFleet:
    """vLLM instances on the machine's clock."""

    engines: Sequence[WorkerEngine]
    clock: Clock
    model: ModelInfo
    tokenizer: ModelTokenizer | None


@hookimpl
def seer_make_engines(settings: Settings, startup: Startup) -> VllmFleet:
    """Return the instances, not yet started."""
    model_dir = startup.path(settings.model)
    model = read_model_info(model_dir, settings.max_model_tokens)
    temporary = Path(tempfile.gettempdir(), f"seer-vllm-{secrets.token_hex(8)}")
    log_dir = startup.path(settings.log_dir) if settings.log_dir else temporary
    arguments = engine_args(settings, model_dir)
    devices = share_devices(settings, os.environ)
    parallel = settings.tensor_parallel
    cannot_share_kv = None if parallel == 1 else SPREAD.format(parallel)
    launcher = LocalLauncher(log_dir, keep_logs=settings.log_dir is not None)
    labels = labels_of(settings.labels, settings.instances, "engine.vllm")
    engines = []
    for index in range(settings.instances):
        id = f"vllm-{index}"
        launch = Launch(
            instance=INSTANCE,
            settings=arguments,
            environment=worker_environment(os.environ, settings.threads, devices[index]),
            launcher=launcher,
            report_interval_s=settings.report_interval_s,
            start_timeout_s=settings.start_timeout_s,
            stop_timeout_s=settings.stop_timeout_s,
            control_timeout_s=settings.control_timeout_s,
            silence_timeout_s=settings.silence_timeout_s,
            own_methods=OWN_METHODS,
            cannot_share_kv=cannot_share_kv,
        )
        engines.append(WorkerEngine(id, launch, labels[index]))
    tokenizer = ModelTokenizer(model_dir) if (model_dir / "tokenizer.json").exists() else None
    return VllmFleet(engines, RealClock(), model, tokenizer)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for vLLM, and for what the settings need."""
    checks = installation()
    if settings is not None and startup is not None:
        model = startup.path(settings.model)
        checks += machine(model, settings.instances, settings.threads, settings.kv_cache_bytes)
    return checks


def read_model_info(model_dir: Path, max_model_tokens: int) -> ModelInfo:
    """Read the vocabulary size and the length limit from the model's ``config.json``.

    Raises:
        ConfigError: there is no such model, or ``max_model_tokens`` is more than it can take.
    """
    path = model_dir / "config.json"
    if not model_dir.is_dir():
        raise ConfigError(f"engine.vllm.model: {model_dir} is no directory; {NAME_A_MODEL}")
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"engine.vllm.model: {path} cannot be read: {flaw(error)}; {NAME_A_MODEL}"
        ) from error
    try:
        config = msgspec.json.decode(raw, type=ModelConfig)
    except UNREADABLE as error:
        raise ConfigError(
            f"engine.vllm.model: {path} is no model's configuration: {flaw(error, raw)}; {NAME_A_MODEL}"
        ) from error
    text = config.text_config or config
    for name in ("vocab_size", "max_position_embeddings"):
        if getattr(text, name) is None:
            raise ConfigError(f"engine.vllm.model: {path} does not say {name!r}; {NAME_A_MODEL}")
    assert text.vocab_size is not None
    assert text.max_position_embeddings is not None
    limit = text.max_position_embeddings
    if max_model_tokens > limit:
        raise ConfigError(
            f"engine.vllm.max_model_tokens = {max_model_tokens}, but the model in {model_dir} takes {limit};"
            " lower it"
        )
    return ModelInfo(text.vocab_size, max_model_tokens or limit, MAX_TEMPERATURE)


def engine_args(settings: Settings, model_dir: Path) -> dict[str, Any]:
    """Return the arguments of vLLM's ``EngineArgs``.

    Raises:
        ConfigError: ``engine_args`` sets what a setting, or Seer itself, already decides.
    """
    for name, why in OWN_ENGINE_ARGS.items():
        if name in settings.engine_args:
            raise ConfigError(f"engine.vllm.engine_args.{name} cannot be set: {why}")
    arguments: dict[str, Any] = {
        "model": str(model_dir.absolute()),
        "dtype": settings.dtype,
        "block_size": settings.block_size,
        "max_num_seqs": settings.max_running,
        "tensor_parallel_size": settings.tensor_parallel,
        "distributed_executor_backend": "uni" if settings.tensor_parallel == 1 else "mp",
        "enforce_eager": settings.enforce_eager,
    }
    optional = {
        "kv_cache_memory_bytes": settings.kv_cache_bytes,
        "max_model_len": settings.max_model_tokens,
        "max_num_batched_tokens": settings.max_batched_tokens,
    }
    return arguments | {name: value for name, value in optional.items() if value} | settings.engine_args


def share_devices(settings: Settings, environment: Mapping[str, str]) -> list[Sequence[str]]:
    """Return each instance's slice of the visible devices; empty ones where none are visible.

    Raises:
        ConfigError: there are too few.
    """
    each, needed = settings.tensor_parallel, settings.tensor_parallel * settings.instances
    inherited = environment.get("CUDA_VISIBLE_DEVICES")
    if settings.visible_devices:
        devices = list(settings.visible_devices)
    elif inherited is None:
        devices = [str(index) for index in range(needed)]
    elif inherited.strip() in ("", "-1"):
        return [()] * settings.instances
    else:
        devices = inherited.split(",")
    if len(devices) < needed:
        raise ConfigError(
            f"engine.vllm: {settings.instances} instances of {each} devices need {needed}, visible are"
            f" {len(devices)}; lower instances or tensor_parallel"
        )
    return [devices[start : start + each] for start in range(0, needed, each)]


def worker_environment(
    environment: Mapping[str, str], threads: int, devices: Sequence[str]
) -> dict[str, str]:
    """Return the environment of a worker: offline, engine core in-process, first model runner."""
    result = {name: value for name, value in environment.items() if name != "VLLM_CPU_KVCACHE_SPACE"}
    return result | {
        "CUDA_VISIBLE_DEVICES": ",".join(devices),
        "HF_HUB_OFFLINE": "1",
        "NUMBA_NUM_THREADS": str(threads),
        "OMP_NUM_THREADS": str(threads),
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_USE_V2_MODEL_RUNNER": "0",
    }
