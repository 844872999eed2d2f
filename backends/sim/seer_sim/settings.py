"""Settings that every emulated instance has, simulated or with a real scheduler."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import msgspec
from msgspec import Meta

from seer_core.errors import ConfigError, quote
from seer_core.json_files import describe_flaw
from seer_core.plugins.config_types import NotNegative
from seer_core.plugins.labels import InstanceLabels
from seer_sim.clock import VirtualClock
from seer_sim.cost import PRESETS, CostModel
from seer_sim.drafts import Drafts
from seer_sim.lengths import Lengths

__all__ = ["EmulatedSettings", "Kill", "check_limits", "cost_of", "schedule_losses"]

Count = Annotated[int, Meta(ge=1)]
Instances = Annotated[int, Meta(ge=1, le=65536)]


class Kill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lose ``instance`` at ``at_s``; it can be up again ``restart_after_s`` later."""

    instance: str
    at_s: NotNegative
    restart_after_s: NotNegative = 0.0


class EmulatedSettings(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Limits, costs and responses of emulated instances; times are virtual, capacities per instance.

    ``cost`` overrides single constants of the preset's CostModel.  ``chunk_s`` and ``chunk_s_per_token`` are
    what instances report of a chunk's end (see ``InstanceInfo``), 0 where unknown; they take no virtual time.
    Placers see ``labels``, one table for all or a list with one for each.
    """

    instances: Instances = 2
    kv_capacity_tokens: Count = 16384
    block_tokens: Count = 16
    max_running: Count = 64
    max_model_tokens: Count = 8192
    max_batched_tokens: Count = 8192
    vocab_size: Annotated[int, Meta(ge=512)] = 32000
    preset: Literal["cpu-tiny", "h800-qwen2-vl-72b-tp8", "h800-moonlight", "h800-kimi-k2"] = "cpu-tiny"
    cost: dict[str, float] = {}
    lengths: Lengths = Lengths()
    acceptance: Drafts = Drafts()
    chunk_s: NotNegative = 0.0
    chunk_s_per_token: NotNegative = 0.0
    report_interval_s: NotNegative = 1.0
    kill_at_s: tuple[Kill, ...] = ()
    labels: InstanceLabels = {}


class Mortal(Protocol):
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


def schedule_losses(
    kills: Iterable[Kill], instances: Mapping[str, Mortal], clock: VirtualClock, table: str
) -> None:
    """Kill instances at the times that settings name.

    Raises:
        ConfigError: there is no such instance.
    """
    for kill in kills:
        if kill.instance not in instances:
            names = ", ".join(instances)
            raise ConfigError(f"{table}.kill_at_s: no instance {quote(kill.instance)}; there are {names}")
        die = partial(instances[kill.instance].kill, f"killed by {table}.kill_at_s", kill.restart_after_s)
        clock.call_at(kill.at_s, die)
