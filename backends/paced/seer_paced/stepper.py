"""An emulated instance that makes a step on request, at a given time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct
from seer_worker.process.adapter import EngineAdapter
from seer_worker.process.worker import Worker
from seer_worker.wire import FromWorker, Start, ToWorker

from seer_core.model import InstanceInfo
from seer_paced.emulated_clock import CountingClock

__all__ = ["LocalStepper", "Stepper", "TurnResult"]


class TurnResult(Struct, frozen=True, tag=True):
    """The answers and results of a turn.

    ``answers`` are to the messages.  ``results`` are a step's, which takes ``step_s`` seconds and has let in
    the requests ``admitted``; they are None if there was nothing to do.
    """

    answers: list[FromWorker]
    results: list[FromWorker] | None = None
    step_s: float = 0.0
    admitted: list[str] = []


class Stepper(Protocol):
    """An emulated instance, wherever it lives."""

    info: InstanceInfo
    """The limits of the instance."""

    def turn(self, now_s: float, messages: Sequence[ToWorker], *, step: bool) -> TurnResult:
        """Take messages, and then make a step if one is wanted and there is something to do."""
        ...

    def close(self) -> None:
        """End the instance."""
        ...


class LocalStepper:
    """An instance in this process, as ``start`` asks for it; ``make`` returns its engine for a clock."""

    def __init__(
        self, make: Callable[[CountingClock], EngineAdapter], start: Start, report_interval_s: float
    ) -> None:
        self._clock = CountingClock()
        self._sent: list[FromWorker] = []
        self._worker = Worker(self._send, make(self._clock), start, self._clock.now, report_interval_s)
        self.info = self._worker.info

    def turn(self, now_s: float, messages: Sequence[ToWorker], *, step: bool) -> TurnResult:
        """Take messages, and then make a step if one is wanted and there is something to do."""
        self._clock.clock_s = now_s
        for message in messages:
            self._worker.handle(message)
        answers = self._take()
        if not (step and self._worker.busy):
            return TurnResult(answers)
        self._worker.step()
        result = TurnResult(answers, self._take(), self._clock.step_s, self._clock.admitted)
        self._clock.begin_step()
        return result

    def close(self) -> None:
        """End the instance."""
        self._worker.close()

    def _send(self, *messages: FromWorker) -> None:
        self._sent += messages

    def _take(self) -> list[FromWorker]:
        sent, self._sent = self._sent, []
        return sent
