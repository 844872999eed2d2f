"""``[engine.paced]``, and what follows from it.  Imports neither vLLM nor torch."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import attrs
import msgspec
from msgspec import Meta, Struct
from seer_sim.cost import PRESETS, CostModel
from seer_sim.lengths import Lengths
from seer_sim.plugin import Kill, check_limits

from seer_core.errors import ConfigError
from seer_core.labels import InstanceLabels
from seer_core.numbers import NotNegative, Positive, Seconds
from seer_core.reading import flaw

__all__ = ["Extras", "Settings", "block_bytes", "check", "cost_of", "extras_of", "head_size"]

Count = Annotated[int, Meta(ge=1)]
Few = Annotated[int, Meta(ge=1, le=1024)]

PRINT_BYTES = 64
"""What a block takes at least in this machine's memory, and in a KV pool."""

GPU_BYTES = 80e9
"""Memory of one H800."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.paced]``; times are the emulated accelerator's, capacities are per instance.

    ``preset`` and ``cost`` are those of ``[engine.sim]``: what a step takes.  With ``gpus_per_instance``
    (of 80 GB), weights and KV have to find room on so many.  ``lengths`` says how long responses are, and
    their tokens are made up, unless ``script`` is a ``completions.jsonl``, whose texts are repeated, request
    by request.  ``model`` is a directory whose tokenizer and vocabulary count.  On the "virtual" clock all
    instances run in this process, and nobody waits; on the "real" one each has a process, and ``speed``
    emulated seconds pass in one of the machine's.  Steps that bring KV from the pool take ``move_s`` longer,
    and these and those that save some there its bytes over ``move_bytes_per_s``; those that verify drafts
    take ``draft_step_s``, and those that make some ``draft_request_s`` for each request that gets one.
    ``chunk_s`` and ``chunk_s_per_token`` are what instances say of a chunk's end, as in ``[engine.sim]``.
    ``scheduler`` says whose scheduler runs; SGLang's does under ``python``, by default the interpreter that
    ``[engine.sglang]`` would take.
    """

    scheduler: Literal["vllm", "sglang"] = "vllm"
    python: str | None = None
    instances: Few = 2
    kv_capacity_tokens: Count = 16384
    block_tokens: Annotated[int, Meta(ge=4, le=1024)] = 16
    max_running: Count = 64
    max_model_tokens: Count = 8192
    max_batched_tokens: Count = 8192
    vocab_size: Annotated[int, Meta(ge=512)] = 32000
    model: str = ""
    preset: Literal["cpu-tiny", "h800-qwen2-vl-72b-tp8", "h800-moonlight", "h800-kimi-k2"] = "cpu-tiny"
    cost: dict[str, float] = {}
    gpus_per_instance: Annotated[int, Meta(ge=0)] = 0
    lengths: Lengths = Lengths()
    script: str = ""
    clock: Literal["virtual", "real"] = "virtual"
    speed: Positive = 1.0
    move_s: NotNegative = 2e-3
    move_bytes_per_s: Positive = 200e9
    draft_step_s: NotNegative = 0.0
    draft_request_s: NotNegative = 12e-6
    chunk_s: NotNegative = 0.0
    chunk_s_per_token: NotNegative = 0.0
    report_interval_s: NotNegative = 1.0
    kill_at_s: tuple[Kill, ...] = ()
    start_timeout_s: Seconds = 180.0
    stop_timeout_s: Seconds = 10.0
    control_timeout_s: Seconds = 120.0
    silence_timeout_s: Seconds = 300.0
    log_dir: str | None = None
    labels: InstanceLabels = {}


@attrs.frozen
class Extras:
    """What a step takes besides its positions, in emulated seconds."""

    move_s: float
    move_s_per_token: float
    draft_step_s: float
    draft_request_s: float


def cost_of(settings: Settings) -> CostModel:
    """Return what a step costs.

    Raises:
        ConfigError: a constant is unknown or out of range.
    """
    constants: dict[str, Any] = {**msgspec.structs.asdict(PRESETS[settings.preset]), **settings.cost}
    try:
        return msgspec.convert(constants, CostModel)
    except msgspec.ValidationError as error:
        known = ", ".join(CostModel.__struct_fields__)
        raise ConfigError(f"engine.paced.cost: {flaw(error)}; its keys are {known}") from error


def extras_of(settings: Settings, cost: CostModel) -> Extras:
    """Return what moving KV and drafting take."""
    return Extras(
        settings.move_s,
        cost.kv_bytes_per_token / settings.move_bytes_per_s,
        settings.draft_step_s,
        settings.draft_request_s,
    )


def check(settings: Settings) -> None:
    """Refuse what no engine could run, and what no accelerator could hold.

    Raises:
        ConfigError: settings contradict each other.
    """
    check_limits(settings, "engine.paced")
    if settings.clock == "virtual" and settings.speed != 1.0:
        raise ConfigError('engine.paced.speed is of the "real" clock; drop it, or write clock = "real"')
    if settings.clock == "real" and settings.kill_at_s:
        raise ConfigError("engine.paced.kill_at_s is of the virtual clock; kill the worker's process instead")
    if settings.scheduler == "vllm" and settings.python is not None:
        raise ConfigError('engine.paced.python is of SGLang; drop it, or write scheduler = "sglang"')
    if settings.scheduler == "sglang" and settings.max_batched_tokens % settings.block_tokens:
        raise ConfigError(
            f"engine.paced: max_batched_tokens = {settings.max_batched_tokens} is no multiple of"
            f" block_tokens = {settings.block_tokens}; SGLang prefills whole blocks"
        )
    cost, gpus = cost_of(settings), settings.gpus_per_instance
    kv_bytes = settings.kv_capacity_tokens * cost.kv_bytes_per_token
    weight_bytes = cost.weight_bytes + cost.expert_bytes
    if gpus and weight_bytes + kv_bytes > gpus * GPU_BYTES:
        raise ConfigError(
            f"engine.paced: {weight_bytes / 1e9:,.0f} GB of weights and {kv_bytes / 1e9:,.0f} GB of KV do not"
            f" fit gpus_per_instance = {gpus} of 80 GB; raise it, or lower kv_capacity_tokens"
        )


def head_size(block_tokens: int) -> int:
    """Return the size of the only head of a layer whose blocks, of bfloat16, have room for a fingerprint."""
    least = -(-PRINT_BYTES // (4 * block_tokens))
    return least + least * block_tokens % 2  # whole words of 8 bytes


def block_bytes(block_tokens: int) -> int:
    """Return the bytes of a block in this machine's memory."""
    return 4 * block_tokens * head_size(block_tokens)
