"""The audience of a rollout: its observers, from their start to their stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import structlog

from seer_core.blame import fault
from seer_core.errors import PluginError, SeerError
from seer_core.events import Command, Event, InstanceReported
from seer_core.kv import KVPool
from seer_core.model import Completion, Piece
from seer_core.policy import CompletionObserver, GrowthObserver, LivingObserver, Observer, PoolObserver
from seer_core.scheduler import CORE, Slot

__all__ = ["Audience"]

log = structlog.get_logger("seer")

POOL_INTERVAL_S = 1.0
"""Time between two looks at the KV pool's figures, at least."""


class Audience:
    """Shows every event to the observers, until they stop.

    One that raises is left out from then on; the rollout goes on.  The core's own, such as the trace, are
    results: if one of them fails, so does the rollout.  In ``debug`` it fails whoever raises, and observers
    are watched like strategies.  ``left_out`` counts those that raised since the last start.  ``kv_pool`` is
    the one whose figures ``PoolObserver`` see.
    """

    def __init__(
        self, slots: Sequence[Slot[Observer]], *, debug: bool = False, kv_pool: Slot[KVPool] | None = None
    ) -> None:
        self.debug = debug
        self.left_out = 0
        self._slots = slots
        self._kv_pool = kv_pool
        self._open = False
        self._started: list[tuple[Slot[Observer], LivingObserver]] = []
        self._fill()

    def _fill(self) -> None:
        self._shown = [slot.watched() for slot in self._slots] if self.debug else list(self._slots)
        self._to_completions = _those(self._shown, CompletionObserver)
        self._to_growth = _those(self._shown, GrowthObserver)
        self._to_pool = _those(self._shown, PoolObserver) if self._kv_pool is not None else []
        self._now, self._pool_shown_s = 0.0, -math.inf
        self.left_out = 0

    async def start(self) -> None:
        """Start the observers that live; events are shown to all, whoever has raised before.

        Raises:
            PluginError: one raised; those before it have been started.
        """
        self._fill()
        self._open = True
        for slot in self._slots:
            if isinstance(slot.strategy, LivingObserver):
                try:
                    await slot.strategy.start()
                except SeerError:
                    raise
                except Exception as error:
                    raise _blame(slot, error) from error
                self._started.append((slot, slot.strategy))

    async def stop(self) -> None:
        """Stop what was started, last first, those left out too; what they raise is logged.  Idempotent.

        From now on nobody is shown anything: whoever has stopped has closed what it writes to.
        """
        if self._open:
            self._open = False
            try:
                self._show_pool()
            except SeerError as error:  # in debug
                log.error("stop_failed", slot="observer", error=str(error))
        self._shown, self._to_completions, self._to_growth, self._to_pool = [], [], [], []
        while self._started:
            slot, observer = self._started.pop()
            try:
                await observer.stop()
            except Exception as error:
                log.error("stop_failed", slot=slot.name, plugin=slot.owner, error=fault(error, observer))

    def show(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Show an event at ``now`` seconds with the commands it led to.

        Raises:
            SeerError: one of the core's own raised it.
            PluginError: an observer raised, in ``debug``.
        """
        for slot in self._shown:
            try:
                slot.strategy.observe(now, event, commands)
            except Exception as error:
                self._raised(slot, error)
        self._now = now
        if self._to_pool and type(event) is InstanceReported and now >= self._pool_shown_s + POOL_INTERVAL_S:
            self._show_pool()

    def completed(self, now: float, completion: Completion) -> None:
        """Show a response that is over, to those who want to see it; raises as ``show``."""
        for slot in self._to_completions:
            try:
                slot.strategy.completed(now, completion)
            except Exception as error:
                self._raised(slot, error)

    def grew(self, now: float, piece: Piece) -> None:
        """Show what a running chunk has written, to those who want to see it; raises as ``show``."""
        for slot in self._to_growth:
            try:
                slot.strategy.grew(now, piece)
            except Exception as error:
                self._raised(slot, error)

    def _show_pool(self) -> None:
        """Show the KV pool's figures; a pool that cannot tell them is not asked again."""
        if self._kv_pool is None or not self._to_pool:
            return
        self._pool_shown_s = self._now
        try:
            stats = self._kv_pool.strategy.stats()
        except Exception as error:
            self._to_pool = []
            fact = fault(error, self._kv_pool.strategy)
            log.error("pool_figures_failed", plugin=self._kv_pool.owner, error=fact)
            return
        for slot in self._to_pool:
            try:
                slot.strategy.pool_reported(self._now, stats)
            except Exception as error:
                self._raised(slot, error)

    def _raised(self, slot: Slot[Observer], error: Exception) -> None:
        if self.debug or slot.owner == CORE:
            raise error if isinstance(error, SeerError) else _blame(slot, error) from error
        for name in ("_shown", "_to_completions", "_to_growth", "_to_pool"):
            setattr(self, name, [each for each in getattr(self, name) if each is not slot])
        self.left_out += 1
        log.error("observer_left_out", plugin=slot.owner, error=fault(error, slot.strategy))


def _those(slots: Sequence[Slot[Observer]], protocol: type) -> list[Slot[Any]]:
    return [slot for slot in slots if isinstance(slot.strategy, protocol)]


def _blame(slot: Slot[Observer], error: Exception) -> PluginError:
    return PluginError(
        f"plug-in {slot.owner!r}, slot {slot.name!r}: raised {fault(error, slot.strategy)};"
        f" run without it: -p no:{slot.owner}"
    )
