"""A paced instance that makes a step when it is told to, at a time that it is told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from msgspec import Struct
from seer_host.instance import Instance
from seer_host.wire import FromWorker, ToWorker
from seer_host.worker import Worker

from seer_core.model import InstanceInfo
from seer_paced.pace import VirtualPace

__all__ = ["Stepper", "SteppingInstance", "Turned"]


class SteppingInstance(Instance, Protocol):
    """An instance that says whom its last step has let in."""

    @property
    def admitted(self) -> Sequence[str]:
        """The requests that the last step has let in, again or anew."""
        ...


class Turned(Struct, frozen=True, tag=True):
    """What came of a turn.

    ``answers`` are to the messages.  ``results`` are a step's, which takes ``step_s`` seconds and has let in
    the requests ``admitted``; they are None if there was nothing to do.
    """

    answers: list[FromWorker]
    results: list[FromWorker] | None = None
    step_s: float = 0.0
    admitted: list[str] = []


class Stepper:
    """An instance in this process, which ``make`` returns for a pace."""

    def __init__(self, make: Callable[[VirtualPace], SteppingInstance], report_interval_s: float) -> None:
        self._pace = VirtualPace()
        self._instance = make(self._pace)
        self._said: list[FromWorker] = []
        self._worker = Worker(self._send, self._instance, self._pace.now, report_interval_s)

    @property
    def info(self) -> InstanceInfo:
        """What the instance is."""
        return self._instance.info

    def turn(self, now_s: float, messages: Sequence[ToWorker], *, step: bool) -> Turned:
        """Obey, and then make a step if one is wanted and there is something to do."""
        self._pace.clock_s = now_s
        for message in messages:
            self._worker.obey(message)
        answers = self._take()
        if not (step and self._worker.busy):
            return Turned(answers)
        self._worker.step()
        turned = Turned(answers, self._take(), self._pace.step_s, list(self._instance.admitted))
        self._pace.begin()
        return turned

    def close(self) -> None:
        """End the instance."""
        self._instance.close()

    def _send(self, *messages: FromWorker) -> None:
        self._said += messages

    def _take(self) -> list[FromWorker]:
        said, self._said = self._said, []
        return said
