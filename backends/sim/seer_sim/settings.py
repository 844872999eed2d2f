"""Settings that every emulated instance has, simulated or with a real scheduler."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta
from seer_host.json_files import describe_flaw
from seer_host.labels import InstanceLabels

from seer_core.errors import ConfigError, quote
from seer_core.plugins.config_types import NotNegative
from seer_sim.clock import VirtualClock
from seer_sim.cost import CostModel
from seer_sim.drafts import Drafts
from seer_sim.lengths import Lengths
from seer_sim.presets import PRESETS

__all__ = ["EmulatedSettings", "Kill", "check_instance", "check_limits", "cost_of", "schedule_losses"]

Count = Annotated[int, Meta(ge=1)]
Instances = Annotated[int, Meta(ge=1, le=65536)]


class Kill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of ``kill_at_s``: the loss of an instance."""

    instance: str
    """The name of the instance that is lost."""
    at_s: NotNegative
    """When it is lost, in seconds of virtual time."""
    restart_after_s: NotNegative = 0.0
    """How long it takes until the instance can be up again."""


class EmulatedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits, costs and responses of emulated instances; times are virtual, capacities per instance."""

    instances: Instances = 2
    """How many instances there are."""
    kv_capacity_tokens: Count = 16384
    """The tokens whose KV one instance holds: a multiple of ``block_tokens``, and at least
    ``max_model_tokens``.
    """
    block_tokens: Count = 16
    """The tokens of one KV block."""
    max_running: Count = 64
    """The most requests that one instance decodes in a step."""
    max_model_tokens: Count = 8192
    """The longest context, prompt and response together."""
    max_batched_tokens: Count = 8192
    """The most tokens that one step computes; at least ``max_running``."""
    vocab_size: Annotated[int, Meta(ge=512)] = 32000
    """The size of the vocabulary from which tokens are made up."""
    preset: Literal[
        "cpu-tiny",
        "h100-gpt-oss-120b-tp4",
        "h100-qwen3-32b-tp4",
        "h200-deepseek-v3-tp8",
        "h200-gpt-oss-120b-tp4",
        "h200-kimi-k2.5-tp8",
        "h200-llama-3.1-8b",
        "h200-minimax-m2.5-tp8",
        "h200-qwen3-235b-tp4",
        "h800-kimi-k2",
        "h800-moonlight",
        "h800-qwen2-vl-72b-tp8",
        "h800-qwen2.5-14b",
    ] = "cpu-tiny"
    """The model and accelerator whose step times are emulated."""
    cost: dict[str, float] = {}
    """Constants of the preset's cost model that are replaced; its keys are those of the cost model."""
    lengths: Lengths = Lengths()
    """How long responses are where the job does not say."""
    acceptance: Drafts = Drafts()
    """How many draft tokens are accepted, and the time that drafting takes."""
    chunk_s: NotNegative = 0.0
    """The delay that a chunk causes to others when it comes in, as instances report it; 0 where unknown. It
    takes no virtual time.
    """
    chunk_s_per_token: NotNegative = 0.0
    """The part of that delay that grows with the context; 0 where unknown. It takes no virtual time."""
    report_interval_s: NotNegative = 1.0
    """The virtual time between two reports of an instance."""
    kill_at_s: tuple[Kill, ...] = ()
    """The losses of instances."""
    labels: InstanceLabels = {}
    """Labels that placers see: one table for all instances, or a list with one for each."""


class Killable(Protocol):
    """An instance that can be lost on a virtual clock."""

    def kill(self, reason: str, down_s: float = 0.0) -> None:
        """Die now if alive, and start again no sooner than ``down_s`` later."""
        ...


def cost_of(settings: EmulatedSettings, table: str) -> CostModel:
    """Return what a step costs; ``table`` is the one that the settings stand in.

    Raises:
        ConfigError: a constant is unknown or out of range.
    """
    constants: dict[str, Any] = {**msgspec.structs.asdict(PRESETS[settings.preset]), **settings.cost}
    try:
        return msgspec.convert(constants, CostModel)
    except msgspec.ValidationError as error:
        names = ", ".join(CostModel.__struct_fields__)
        raise ConfigError(f"{table}.cost: {describe_flaw(error)}; its keys are {names}") from error


def check_limits(settings: EmulatedSettings, table: str) -> None:
    """Refuse limits with which a chunk could wait for ever.

    Raises:
        ConfigError: there are such.
    """
    if settings.kv_capacity_tokens % settings.block_tokens:
        raise ConfigError(
            f"{table}.kv_capacity_tokens = {settings.kv_capacity_tokens} is no multiple of"
            f" block_tokens = {settings.block_tokens}; round it"
        )
    if settings.kv_capacity_tokens < settings.max_model_tokens:
        raise ConfigError(
            f"{table}.kv_capacity_tokens = {settings.kv_capacity_tokens} cannot hold one response of"
            f" max_model_tokens = {settings.max_model_tokens}; raise the one or lower the other"
        )
    if settings.max_batched_tokens < settings.max_running:
        raise ConfigError(
            f"{table}.max_batched_tokens = {settings.max_batched_tokens} gives {settings.max_running}"
            " running requests (max_running) less than a token a step; raise the one or lower the other"
        )


def check_instance(name: str, instances: Collection[str], where: str) -> None:
    """Refuse a name in a setting that no instance has.

    Raises:
        ConfigError: there is none.
    """
    if name not in instances:
        raise ConfigError(f"{where}: no instance {quote(name)}; there are {', '.join(instances)}")


def schedule_losses(
    kills: Iterable[Kill], instances: Mapping[str, Killable], clock: VirtualClock, table: str
) -> None:
    """Kill instances at the times that settings name.

    Raises:
        ConfigError: there is no such instance.
    """
    for kill in kills:
        check_instance(kill.instance, instances, f"{table}.kill_at_s")
        die = partial(instances[kill.instance].kill, f"killed by {table}.kill_at_s", kill.restart_after_s)
        clock.call_at(kill.at_s, die)
