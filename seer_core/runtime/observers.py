"""The observers of a rollout, from their start to their stop."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import structlog

from seer_core.error_origin import describe_error, is_interruption
from seer_core.errors import SeerError
from seer_core.model import Completion
from seer_core.model.events import Command, Event, InstanceReported
from seer_core.ports.contracts import implemented
from seer_core.ports.kv import KVPool
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE, Notified, Slot

__all__ = ["ObserverHub", "stop_strategy"]

log = structlog.get_logger("seer")

POOL_INTERVAL_S = 1.0
"""Least time between two reports of the KV pool's figures."""

SHOWN = ("observe", "completed", "streamed", "pool_reported")


class ObserverHub:
    """Shows every event to the observers, until they stop.

    One that raises, whichever class, is left out from then on; the rollout goes on.  The core's own, such as
    the trace, are results: if one of them fails, so does the rollout.  In ``debug`` any failure of an
    observer fails the rollout.  ``failed`` counts those that raised since the last start.  ``kv_pool`` is the
    one whose figures observers see.  ``others`` are started and stopped likewise, and are shown nothing.
    """

    def __init__(
        self,
        slots: Sequence[Slot[Observer]],
        *,
        debug: bool = False,
        kv_pool: Slot[KVPool] | None = None,
        others: Sequence[Slot[Any]] = (),
    ) -> None:
        self.debug = debug
        self.failed = 0
        self._slots = slots
        self._others = others
        self._kv_pool = kv_pool
        self._open = False
        self._started: list[Slot[Any]] = []
        self._shown: dict[str, list[Notified]] = {}
        self._reset()

    def _reset(self) -> None:
        """Show everything to all observers again."""
        self._shown = {method: self._implementing(method) for method in SHOWN}
        self._now, self._pool_shown_s = 0.0, -math.inf
        self.failed = 0

    def _implementing(self, method: str) -> list[Notified]:
        found = ((slot, implemented(slot.strategy, method)) for slot in self._slots)
        return [(slot, call) for slot, call in found if call is not None]

    async def start(self) -> None:
        """Start the observers; events are shown to all, also to those that have raised before.

        Raises:
            PluginError: one raised; those before it have been started.
        """
        self._reset()
        self._open = True
        for slot in (*self._slots, *self._others):
            start = implemented(slot.strategy, "start")
            if start is not None:
                with slot.named():
                    await start()
            self._started.append(slot)

    async def stop(self) -> None:
        """Stop what was started, last first, those left out too; what they raise is logged.  Idempotent.

        From now on nothing is shown: an observer that has stopped has closed what it writes to.
        """
        if self._open:
            self._open = False
            try:
                self._show_pool()
            except SeerError as error:  # in debug
                log.error("stop_failed", slot="observer", error=str(error))
        self._shown = {method: [] for method in SHOWN}
        while self._started:
            slot = self._started.pop()
            if implemented(slot.strategy, "stop") is not None:
                await stop_strategy(slot)

    def notify(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Show an event at ``now`` seconds with the commands it led to.

        Raises:
            SeerError: one of the core's own raised it.
            PluginError: an observer raised, in ``debug``.
        """
        for slot, observe in self._shown["observe"]:  # as ``_show``, without its packing
            try:
                observe(now, event, commands)
            except BaseException as error:
                if is_interruption(error):
                    raise
                self._raised(slot, error)
        self._now = now
        if type(event) is InstanceReported and now >= self._pool_shown_s + POOL_INTERVAL_S:
            self._show_pool()

    def completed(self, now: float, completion: Completion) -> None:
        """Show a response that is over; raises as ``notify``."""
        self._show("completed", now, completion)

    def streamed(self, now: float, request_id: str) -> None:
        """Notify observers that a running chunk has written more; raises as ``notify``."""
        self._show("streamed", now, request_id)

    def _show_pool(self) -> None:
        """Show the KV pool's figures; a pool that raises is not asked again."""
        if self._kv_pool is None or not self._shown["pool_reported"]:
            return
        self._pool_shown_s = self._now
        try:
            stats = self._kv_pool.strategy.stats()
        except BaseException as error:
            if is_interruption(error):
                raise
            self._shown["pool_reported"] = []
            fact = describe_error(error, self._kv_pool.strategy)
            log.error("pool_figures_failed", plugin=self._kv_pool.owner, error=fact)
            return
        self._show("pool_reported", self._now, stats)

    def _show(self, method: str, *what: Any) -> None:
        for slot, call in self._shown[method]:
            try:
                call(*what)
            except BaseException as error:
                if is_interruption(error):
                    raise
                self._raised(slot, error)

    def _raised(self, slot: Slot[Observer], error: BaseException) -> None:
        """Leave an observer out, unless its failure fails the rollout."""
        if self.debug or slot.owner == CORE:
            with slot.named():
                raise error
        for method, shown in self._shown.items():
            self._shown[method] = [each for each in shown if each[0] is not slot]
        self.failed += 1
        log.error("observer_failed", plugin=slot.owner, error=describe_error(error, slot.strategy))


async def stop_strategy(slot: Slot[Any]) -> None:
    """Stop an observer or a KV pool; an error is logged, since the other parts have to be stopped too."""
    try:
        await slot.strategy.stop()
    except BaseException as error:
        if is_interruption(error):
            raise
        fact = describe_error(error, slot.strategy)
        log.error("stop_failed", slot=slot.name, plugin=slot.owner, error=fact)
