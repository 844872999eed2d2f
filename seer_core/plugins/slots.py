"""The strategies that fill the slots of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from seer_core.ports.drafting import Drafter
from seer_core.ports.engine import EngineFleet
from seer_core.ports.kv import KVPool
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import Policies, Slot

__all__ = ["Assembly", "Strategies"]


@attrs.frozen
class Strategies:
    """Every slot but those of launcher, engines and KV pool, filled; that of the drafter may stay empty.

    ``others`` are started and stopped with the observers, and nothing else of them concerns the core.
    ``passed_over`` are the plug-ins, by slot, whose strategies the config does not want.
    """

    policies: Policies
    observers: tuple[Slot[Observer], ...] = ()
    drafter: Slot[Drafter] | None = None
    others: tuple[Slot[Any], ...] = ()
    passed_over: Mapping[str, tuple[str, ...]] = attrs.field(factory=dict, kw_only=True)

    @property
    def slots(self) -> list[Slot[Any]]:
        """All that are filled, the core's defaults and what is wrapped included."""
        drafter = [] if self.drafter is None else [self.drafter]
        return [*self.policies.links, *drafter, *self.others, *self.observers]

    def with_observer(self, *observers: Observer, owner: str = "") -> Strategies:
        """Return the same with further observers, each named by its class unless ``owner`` names them."""
        slots = (Slot("observer", owner or type(each).__name__, each) for each in observers)
        return attrs.evolve(self, observers=(*self.observers, *slots))


@attrs.frozen
class Assembly:
    """All slots filled; nothing started."""

    fleet: EngineFleet
    strategies: Strategies
    kv_pool: Slot[KVPool] | None = None
    launcher: Slot[Any] | None = None

    def with_observer(self, *observers: Observer, owner: str = "") -> Assembly:
        """Return the same with further observers; see ``Strategies.with_observer``."""
        return attrs.evolve(self, strategies=self.strategies.with_observer(*observers, owner=owner))
