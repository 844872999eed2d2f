"""An emulated instance on a virtual clock: exact, repeatable, and without a wait.

A step is computed at the moment when it begins, and its results are delivered when it ends, so much later
as it takes.  What arrives meanwhile takes effect between two steps, as with a worker that reads its socket
there.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import msgspec
from seer_host.scratch import Scratch
from seer_sim.clock import VirtualClock
from seer_worker.client.engine import InstanceSpec, WorkerClient
from seer_worker.wire import Called, ControlCall, FromWorker, Start, Submit, ToWorker

from seer_core.model import InstanceInfo
from seer_paced.stepper import Stepper, TurnResult

__all__ = ["VirtualEngine"]


class VirtualEngine(WorkerClient):
    """Takes turns with an instance that ``make`` returns.

    ``first_steps_s`` holds when the first step of each request here began, and ``turn_steps_s`` of each turn,
    by the context before the turn, where an environment answers.
    """

    log = "in the runtime's process"

    def __init__(
        self,
        id: str,
        spec: InstanceSpec,
        labels: Mapping[str, str] | None,
        clock: VirtualClock,
        make: Callable[[Start], Stepper],
    ) -> None:
        super().__init__(id, spec, labels)
        self.first_steps_s: dict[str, float] = {}
        self.turn_steps_s: dict[tuple[str, int], float] = {}
        self.steps = 0
        self._clock = clock
        self._make = make
        self._not_before_s = 0.0
        self._stepper: Stepper | None = None
        self._scratch: Scratch | None = None
        self._clear()

    def _clear(self) -> None:
        self._inbox: list[ToWorker] = []
        self._results: Sequence[FromWorker] = ()
        self._turns: dict[str, int] = {}
        self._cancel_timer: Callable[[], None] | None = None

    async def find_place(self, waiting: Callable[[str], None]) -> None:
        """Return: there is always a place in this process."""

    async def _open(self, start: Start) -> InstanceInfo:
        """Make the instance, which takes some seconds of this process and none of the clock."""
        if self._not_before_s > self._clock.now():
            await self._clock.sleep_until(self._not_before_s)
        self._scratch = Scratch("seer-paced-")
        self._stepper = self._make(msgspec.structs.replace(start, scratch=str(self._scratch.path)))
        return self._stepper.info

    def _carry(self, message: ToWorker) -> None:
        """Hand a message to the next step, which begins now if none is under way."""
        self._inbox.append(message)
        if isinstance(message, Submit) and message.job.turns:
            self._turns[message.job.request_id] = message.job.context_tokens
        if self._cancel_timer is None:
            self._begin_later()

    async def _ask(self, message: ControlCall) -> Called:
        """Hand over a control message and return the answer, at no cost in time."""
        self._inbox.append(message)
        [answer] = [each for each in self._turn(step=False).answers if isinstance(each, Called)]
        return answer

    async def _close(self) -> None:
        """Drop everything."""
        self._stop_timer()
        self._clear()
        stepper, self._stepper = self._stepper, None
        scratch, self._scratch = self._scratch, None
        if stepper is not None:
            stepper.close()
        if scratch is not None:
            scratch.close()

    def kill(self, reason: str, down_s: float = 0.0) -> None:
        """Die now if alive, and start again no sooner than ``down_s`` later."""
        if self._up:
            self._stop_timer()
            self._clear()
            self._not_before_s = self._clock.now() + down_s
            self._lost(reason)
            self._clock.settle()

    def _stop_timer(self) -> None:
        if self._cancel_timer is not None:
            self._cancel_timer()

    def _begin_later(self) -> None:
        """Begin a step after everything else that happens at this instant."""
        self._cancel_timer = self._clock.call_at(self._clock.now(), self._begin, last=True)

    def _begin(self) -> None:
        self._cancel_timer = None
        now_s = self._clock.now()
        try:
            result = self._turn(step=True)
        except Exception as error:
            self.kill(f"{type(error).__name__}: {error}")
            return
        if result.results is not None:
            self.steps += 1
            for request_id in result.admitted:
                self.first_steps_s.setdefault(request_id, now_s)
                if request_id in self._turns:
                    self.turn_steps_s.setdefault((request_id, self._turns[request_id]), now_s)
            self._results = result.results
            self._cancel_timer = self._clock.call_at(now_s + result.step_s, self._end)
        self._deliver(result.answers)

    def _end(self) -> None:
        self._begin_later()
        results, self._results = self._results, ()
        self._deliver(results)

    def _turn(self, *, step: bool) -> TurnResult:
        inbox, self._inbox = self._inbox, []
        assert self._stepper is not None
        return self._stepper.turn(self._clock.now(), inbox, step=step)

    def _deliver(self, messages: Sequence[FromWorker]) -> None:
        for message in messages:
            self._receive(message)
