"""The audience of a rollout: its observers, from their start to their stop."""

from __future__ import annotations

from collections.abc import Sequence

import structlog

from seer_core.blame import fault
from seer_core.errors import PluginError, SeerError
from seer_core.events import Command, Event
from seer_core.policy import LivingObserver, Observer
from seer_core.scheduler import CORE, Slot

__all__ = ["Audience"]

log = structlog.get_logger("seer")


class Audience:
    """Shows every event to the observers.  One that raises is left out from then on; the rollout goes on.

    The core's own, such as the trace, are results: if one of them fails, so does the rollout.  In ``debug``
    it fails whoever raises, and observers are watched like strategies.  ``left_out`` counts those that raised
    since the last start.
    """

    def __init__(self, slots: Sequence[Slot[Observer]], *, debug: bool = False) -> None:
        self.debug = debug
        self.left_out = 0
        self._slots = slots
        self._started: list[tuple[Slot[Observer], LivingObserver]] = []
        self._fill()

    def _fill(self) -> None:
        self._shown = [slot.watched() for slot in self._slots] if self.debug else list(self._slots)
        self.left_out = 0

    async def start(self) -> None:
        """Start the observers that live; events are shown to all, whoever has raised before.

        Raises:
            PluginError: one raised; those before it have been started.
        """
        self._fill()
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
        """Stop what was started, last first, those left out too; what they raise is logged.  Idempotent."""
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

    def _raised(self, slot: Slot[Observer], error: Exception) -> None:
        if self.debug or slot.owner == CORE:
            raise error if isinstance(error, SeerError) else _blame(slot, error) from error
        self._shown = [each for each in self._shown if each is not slot]
        self.left_out += 1
        log.error("observer_left_out", plugin=slot.owner, error=fault(error, slot.strategy))


def _blame(slot: Slot[Observer], error: Exception) -> PluginError:
    return PluginError(
        f"plug-in {slot.owner!r}, slot {slot.name!r}: raised {fault(error, slot.strategy)};"
        f" run without it: -p no:{slot.owner}"
    )
