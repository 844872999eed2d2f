"""Entry point of the ``sim`` engine: its settings and its factory hook."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta
from seer_host.labels import labels_of

from seer_core.model import InstanceInfo
from seer_core.plugins.config_types import NotNegative, Positive
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.engine import EngineFleet, ModelInfo, PlainFleet
from seer_sim.clock import VirtualClock
from seer_sim.drafts import make_methods
from seer_sim.engine import SimEngine
from seer_sim.lengths import CONTROLS
from seer_sim.settings import EmulatedSettings, check_instance, check_limits, cost_of, schedule_losses
from seer_sim.tokens import ByteTokenizer

__all__ = ["Settings", "make_fleet", "seer_make_engines"]

TABLE = "engine.sim"

TIER = "supported"


class Settings(EmulatedSettings, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """``[engine.sim]``: simulated instances, named ``sim-0``, ``sim-1`` and so on."""

    drafts: dict[str, dict[str, Any]] = msgspec.field(default_factory=dict)
    """Constants of methods of drafting that are replaced: a table by the method's name, with the keys of
    ``acceptance``.
    """
    request_s: NotNegative | None = None
    """The virtual time that a request, or its answer, takes on its way to instances that stand for servers of
    other programs, which preempt where KV runs short; none for instances of Seer's own.
    """
    start_s: NotNegative = 0.0
    """The virtual time that the start of an instance takes."""
    instances_per_node: Annotated[int, Meta(ge=0)] = 0
    """How many instances a node has; 0 for all on one."""
    speeds: dict[str, Positive] = msgspec.field(default_factory=dict)
    """The speed of single instances, by name, as a multiple of the others': 0.5 is half of it. Drafting takes
    as long everywhere.
    """


def make_fleet(settings: Settings) -> PlainFleet:
    """Return the instances that ``settings`` describe.

    Raises:
        ConfigError: settings contradict each other.
    """
    cost = cost_of(settings, TABLE)
    methods = make_methods(settings.drafts)
    check_limits(settings, TABLE)
    labels = labels_of(settings.labels, settings.instances, TABLE)
    per_node = settings.instances_per_node or settings.instances
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
                node=f"node-{number // per_node}",
            ),
            clock,
            cost.at_speed(settings.speeds.get(f"sim-{number}", 1.0)),
            lengths=settings.lengths,
            vocab_size=settings.vocab_size,
            max_batched_tokens=settings.max_batched_tokens,
            acceptance=settings.acceptance,
            methods=methods,
            start_s=settings.start_s,
            report_interval_s=settings.report_interval_s,
            request_s=settings.request_s,
        )
        for number in range(settings.instances)
    }
    schedule_losses(settings.kill_at_s, engines, clock, TABLE)
    for name in settings.speeds:
        check_instance(name, engines, f"{TABLE}.speeds")
    model = ModelInfo(settings.vocab_size, settings.max_model_tokens, controls=CONTROLS)
    return PlainFleet(list(engines.values()), clock, model, ByteTokenizer())


@hookimpl
def seer_make_engines(settings: Any, startup: Startup) -> EngineFleet | None:
    """Return simulated instances; the same settings make the same run."""
    return make_fleet(settings)
