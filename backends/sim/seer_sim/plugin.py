"""Entry point of the ``sim`` engine: its settings and its factory hook."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Annotated, Any, Literal, Protocol

import attrs
import msgspec
from msgspec import Meta

from seer_core.errors import ConfigError, quote
from seer_core.hookspecs import Startup, hookimpl
from seer_core.labels import InstanceLabels, labels_of
from seer_core.model import InstanceInfo
from seer_core.numbers import NotNegative
from seer_core.ports import Clock, Engine, EngineFleet, ModelInfo, Tokenizer
from seer_core.reading import flaw
from seer_sim.clock import VirtualClock
from seer_sim.cost import PRESETS, CostModel
from seer_sim.drafts import Drafts, make_methods
from seer_sim.engine import SimEngine
from seer_sim.lengths import Lengths
from seer_sim.tokens import ByteTokenizer

__all__ = ["Kill", "Settings", "SimFleet", "check_limits", "make_fleet", "seer_make_engines"]

Count = Annotated[int, Meta(ge=1)]
Instances = Annotated[int, Meta(ge=1, le=65536)]


class Kill(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Lose ``instance`` at ``at_s``; it can be up again ``restart_after_s`` later."""

    instance: str
    at_s: NotNegative
    restart_after_s: NotNegative = 0.0


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Keys of ``[engine.sim]``.  All times are virtual; capacities are per instance.

    ``cost`` overrides single constants of the preset's CostModel, ``drafts`` those of a method of drafting,
    by its name.  ``chunk_s`` and ``chunk_s_per_token`` are what instances say of a chunk's end (see
    ``InstanceInfo``), 0 where unknown; they take no virtual time.  Instances are named ``sim-0``, ``sim-1``
    and so on; placers see ``labels``, one table for all or a list with one for each.
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
    drafts: dict[str, dict[str, Any]] = {}
    chunk_s: NotNegative = 0.0
    chunk_s_per_token: NotNegative = 0.0
    start_s: NotNegative = 0.0
    report_interval_s: NotNegative = 1.0
    kill_at_s: tuple[Kill, ...] = ()
    labels: InstanceLabels = {}


@attrs.define(eq=False)
class SimFleet:
    """Simulated instances on one virtual clock."""

    engines: Sequence[Engine]
    clock: Clock
    model: ModelInfo
    tokenizer: Tokenizer | None


def make_fleet(settings: Settings) -> SimFleet:
    """Return the instances that ``settings`` describe.

    Raises:
        ConfigError: settings contradict each other.
    """
    cost = _cost(settings)
    methods = make_methods(settings.drafts)
    check_limits(settings, "engine.sim")
    labels = labels_of(settings.labels, settings.instances, "engine.sim")
    clock = VirtualClock()
    engines = {
        f"sim-{number}": SimEngine(
            InstanceInfo(
                id=f"sim-{number}",
                kv_capacity_tokens=settings.kv_capacity_tokens,
                block_tokens=settings.block_tokens,
                max_running=settings.max_running,
                max_model_tokens=settings.max_model_tokens,
                shares_prompts=True,
                chunk_s=settings.chunk_s,
                chunk_s_per_token=settings.chunk_s_per_token,
                labels=labels[number],
            ),
            clock,
            cost,
            lengths=settings.lengths,
            vocab_size=settings.vocab_size,
            max_batched_tokens=settings.max_batched_tokens,
            acceptance=settings.acceptance,
            methods=methods,
            start_s=settings.start_s,
            report_interval_s=settings.report_interval_s,
        )
        for number in range(settings.instances)
    }
    for kill in settings.kill_at_s:
        if kill.instance not in engines:
            known = ", ".join(engines)
            raise ConfigError(f"engine.sim.kill_at_s: no instance {quote(kill.instance)}; there are {known}")
        die = partial(engines[kill.instance].kill, "killed by engine.sim.kill_at_s", kill.restart_after_s)
        clock.call_at(kill.at_s, die)
    model = ModelInfo(vocab_size=settings.vocab_size, max_model_tokens=settings.max_model_tokens)
    return SimFleet(list(engines.values()), clock, model, ByteTokenizer())


@hookimpl
def seer_make_engines(settings: Any, startup: Startup) -> EngineFleet | None:
    """Return simulated instances; the same settings make the same run."""
    return make_fleet(settings)


def _cost(settings: Settings) -> CostModel:
    constants = {**msgspec.structs.asdict(PRESETS[settings.preset]), **settings.cost}
    try:
        return msgspec.convert(constants, CostModel)
    except msgspec.ValidationError as error:
        known = ", ".join(CostModel.__struct_fields__)
        raise ConfigError(f"engine.sim.cost: {flaw(error)}; its keys are {known}") from error


class Limits(Protocol):
    """Settings that say what an instance can hold."""

    @property
    def kv_capacity_tokens(self) -> int: ...
    @property
    def block_tokens(self) -> int: ...
    @property
    def max_model_tokens(self) -> int: ...
    @property
    def max_running(self) -> int: ...
    @property
    def max_batched_tokens(self) -> int: ...


def check_limits(settings: Limits, table: str) -> None:
    """Refuse limits with which a chunk could wait for ever; ``table`` is the one that they stand in."""
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
