"""``[engine.paced]``, and what follows from it.  Imports neither vLLM nor torch."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta
from seer_sim.pool import MoveRates
from seer_sim.settings import EmulatedSettings, check_limits, cost_of
from seer_worker.client.fleet import ProcessSettings

from seer_core.errors import ConfigError
from seer_core.plugins.config_types import Positive

__all__ = ["TABLE", "Settings", "block_bytes", "check", "head_size"]

TABLE = "engine.paced"

PRINT_BYTES = 64
"""What a block takes at least in this machine's memory, and in a KV pool."""

GPU_BYTES = 80e9
"""Memory of one H800."""


class Settings(EmulatedSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.paced]``: a real engine's scheduler on an emulated accelerator.

    Of ``acceptance`` only ``step_s`` and ``request_s`` count: the time that drafting takes.  Acceptance is
    the text's own.
    """

    instances: Annotated[int, Meta(ge=1, le=1024)] = 2
    """How many instances there are."""
    block_tokens: Annotated[int, Meta(ge=4, le=1024)] = 16
    """The tokens of one KV block."""
    scheduler: Literal["vllm", "sglang"] = "vllm"
    """Whose scheduler runs; SGLang's runs under ``worker.python``, or under the interpreter that
    ``[engine.sglang]`` would take.
    """
    clock: Literal["virtual", "real"] = "virtual"
    """On the virtual clock all instances run in this process and take no real time; on the real one each has
    a process.
    """
    speed: Positive = 1.0
    """On the real clock: the emulated seconds that pass in one of the machine's."""
    model: str = ""
    """A directory whose tokenizer and vocabulary are used; empty for none."""
    script: str = ""
    """A ``completions.jsonl`` whose texts are repeated, request by request. Without it lengths come from
    ``lengths``, and tokens are made up.
    """
    gpus_per_instance: Annotated[int, Meta(ge=0)] = 0
    """Weights and KV have to find room on so many GPUs of 80 GB; 0 checks nothing."""
    moves: MoveRates = MoveRates()
    """The time of loads from a KV pool and saves to it."""
    awaited_kv_bytes: Annotated[int, Meta(ge=0)] | None = None
    """With more KV to load from the pool a request waits, and the steps of others go on; up to so much is
    loaded before its first step. KV of running chunks is saved once there is half as much, or 16 MiB. Unless
    it is set, it is 32 MiB.
    """
    uniform_drafts: bool = False
    """All drafts of a step have one length, as ``[engine.vllm].uniform_drafts`` makes them on a GPU with full
    CUDA graphs; shorter ones are padded.
    """
    worker: ProcessSettings = ProcessSettings()
    """The interpreter, the log directory and the time limits of processes."""


def check(settings: Settings) -> None:
    """Refuse what no engine could run, and what no accelerator could hold.

    Raises:
        ConfigError: settings contradict each other.
    """
    check_limits(settings, TABLE)
    if settings.clock == "virtual" and settings.speed != 1.0:
        raise ConfigError(f'{TABLE}.speed is of the "real" clock; drop it, or write clock = "real"')
    if settings.clock == "real" and settings.kill_at_s:
        raise ConfigError(f"{TABLE}.kill_at_s is of the virtual clock; kill the worker's process instead")
    if settings.scheduler == "vllm" and settings.worker.python is not None:
        raise ConfigError(f'{TABLE}.worker.python is of SGLang; drop it, or write scheduler = "sglang"')
    if settings.scheduler == "sglang" and settings.max_batched_tokens % settings.block_tokens:
        raise ConfigError(
            f"{TABLE}: max_batched_tokens = {settings.max_batched_tokens} is no multiple of"
            f" block_tokens = {settings.block_tokens}; SGLang prefills whole blocks"
        )
    cost, gpus = cost_of(settings, TABLE), settings.gpus_per_instance
    kv_bytes = settings.kv_capacity_tokens * cost.kv_bytes_per_token
    weight_bytes = cost.weight_bytes + cost.expert_bytes
    if gpus and weight_bytes + kv_bytes > gpus * GPU_BYTES:
        raise ConfigError(
            f"{TABLE}: {weight_bytes / 1e9:,.0f} GB of weights and {kv_bytes / 1e9:,.0f} GB of KV do not"
            f" fit gpus_per_instance = {gpus} of 80 GB; raise it, or lower kv_capacity_tokens"
        )


def head_size(block_tokens: int) -> int:
    """Return the size of the only head of a layer whose blocks, of bfloat16, have room for a fingerprint."""
    least = -(-PRINT_BYTES // (4 * block_tokens))
    return least + least * block_tokens % 2  # whole words of 8 bytes


def block_bytes(block_tokens: int) -> int:
    """Return the bytes of a block in this machine's memory."""
    return 4 * block_tokens * head_size(block_tokens)
