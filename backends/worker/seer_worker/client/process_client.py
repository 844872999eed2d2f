"""An instance in a process of its own: a stream of messages, time limits, and how the process ended."""

from __future__ import annotations

import asyncio
import sys
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from time import monotonic

import attrs
import msgspec
from seer_host.frames import WireError
from seer_host.launcher import Launcher, RunningWorker, TemporaryWorker

from seer_core.errors import EngineError, NoPlaceError
from seer_core.model import InstanceInfo
from seer_worker.client import measurements
from seer_worker.client.engine import InstanceSpec, WorkerClient
from seer_worker.client.local import LocalLauncher
from seer_worker.wire import (
    Called,
    ControlCall,
    Degraded,
    FromWorker,
    Ready,
    Start,
    Submit,
    ToWorker,
    UpdateWeights,
)

__all__ = ["Launch", "ProcessClient"]

LOSS_GRACE_S = 2.0
LONGEST_TURN_S = 1.0
"""A wait for the worker is cut into turns, so that one in which the event loop was blocked is noticed."""


@attrs.frozen(kw_only=True)
class Launch(InstanceSpec):
    """How an instance's worker is started, and how long it may take for what.

    ``launcher`` decides where the worker runs, with this ``environment``, under ``interpreter``: another one
    than this process has, where the engine lives in another environment, which then has ``seer_worker`` too.
    Logs lie in ``log_dir``, and those of a worker without a failure stay only
    with ``keep_logs``.  ``silence_timeout_s`` bounds how long it may send nothing while it has chunks.
    """

    environment: Mapping[str, str]
    launcher: Launcher
    log_dir: Path
    keep_logs: bool = True
    start_timeout_s: float
    stop_timeout_s: float
    control_timeout_s: float
    silence_timeout_s: float
    interpreter: str = sys.executable


class ProcessClient(WorkerClient):
    """An instance whose worker a launcher starts, as ``spec`` says; it has not been started yet."""

    spec: Launch

    def __init__(self, id: str, spec: Launch, labels: Mapping[str, str] | None = None) -> None:
        super().__init__(id, spec, labels)
        self._listener: asyncio.Task[None] | None = None
        self._calls: deque[asyncio.Future[Called]] = deque()
        self._busy_since_s = 0.0
        self._keeps_log = False

    @property
    def log(self) -> str:
        """Where the worker's log is."""
        return "" if self.worker is None else self.worker.log

    async def find_place(self, waiting: Callable[[str], None]) -> None:
        """Wait until the launcher has a place for the worker."""
        await self.spec.launcher.find_place(self.id, waiting)

    async def _open(self, start: Start) -> InstanceInfo:
        launch, id = self.spec, self.id
        ready_by_s = asyncio.get_running_loop().time() + launch.start_timeout_s
        try:
            async with asyncio.timeout_at(ready_by_s):
                worker = await launch.launcher.launch(
                    id,
                    launch.interpreter,
                    launch.environment,
                    launch.log_dir / f"{id}.log",
                    launch.keep_logs,
                )
        except EngineError as error:
            kind = NoPlaceError if isinstance(error, NoPlaceError) else EngineError
            raise kind(f"instance {id!r} did not start: {error}") from error
        except TimeoutError as error:
            limit = f"start_timeout_s = {launch.start_timeout_s:g}"
            raise EngineError(f"instance {id!r} did not start: not launched after {limit}") from error
        self.worker = worker
        try:
            like = launch.interpreter, launch.environment, start
            here = isinstance(launch.launcher, LocalLauncher)
            measured = measurements.recall(*like) if here else None
            worker.send(msgspec.structs.replace(start, scratch=worker.scratch, measured=measured))
            async with asyncio.timeout_at(ready_by_s):
                ready = await self._ready(worker)
        except (EOFError, WireError, TimeoutError) as error:
            self._keeps_log = True
            how = await worker.end(LOSS_GRACE_S if isinstance(error, EOFError) else 0)
            if isinstance(error, EOFError):
                how = _with_flaw(how, error)
            elif isinstance(error, WireError):
                how = f"its worker and it do not understand each other: {error}"
            elif isinstance(error, TimeoutError):
                how = f"not ready after start_timeout_s = {launch.start_timeout_s:g}"
            self.worker = None
            raise EngineError(f"instance {id!r} did not start: {how}\n{worker.last_words()}") from error
        except BaseException:
            await worker.end()
            self.worker = None
            if not self._keeps_log:
                worker.discard_log()
            raise
        if here:
            measurements.keep(*like, ready.measured)
        self._listener = asyncio.create_task(self._listen(worker))
        return ready.info

    def _carry(self, message: ToWorker) -> None:
        """Send a message at the end of this turn of the event loop."""
        if self.worker is not None:
            if isinstance(message, Submit) and self._sent == 1:
                self._busy_since_s = monotonic()
            self.worker.send(message)

    async def _ask(self, message: ControlCall) -> Called:
        worker = self.worker
        assert worker is not None
        if not isinstance(message, UpdateWeights):
            return await self._answer(message, worker)
        try:
            async with AsyncExitStack() as stack:
                base = message.source.base
                if base is not None:
                    base = await stack.enter_async_context(worker.bring_weights(base))
                alone = msgspec.structs.replace(message.source, base=None)
                source = await stack.enter_async_context(worker.bring_weights(alone))
                source = msgspec.structs.replace(source, base=base)
                if self.worker is not worker:
                    return Called("it was lost while the weights were brought to it")
                return await self._answer(msgspec.structs.replace(message, source=source), worker)
        except EngineError as error:
            return Called(str(error))

    async def _answer(self, message: ControlCall, worker: RunningWorker) -> Called:
        """Send a control message and wait for its answer; answers come in order."""
        limit_s = self.spec.control_timeout_s
        call: asyncio.Future[Called] = asyncio.get_running_loop().create_future()
        self._calls.append(call)
        worker.send(message)
        try:
            async with asyncio.timeout(limit_s):
                return await call
        except TimeoutError:
            # It may obey yet, with weights that the runtime does not count on; so it is lost.
            if self.worker is not None and self._listener is not None:
                listener = self._listener
                await worker.end()
                await asyncio.wait({listener})  # which reports the loss first
            return Called(f"no answer after {limit_s:g} s; the instance was ended")

    async def _close(self) -> None:
        """End the worker and all it started, within ``stop_timeout_s`` and a few seconds more."""
        listener, self._listener = self._listener, None
        if listener is not None:
            listener.cancel()
            with suppress(asyncio.CancelledError):
                await listener
        worker, self.worker = self.worker, None
        if worker is not None:
            self._fail_calls("it was stopped")
            await worker.end(self.spec.stop_timeout_s)
            if not self._keeps_log:
                worker.discard_log()

    async def _ready(self, worker: RunningWorker) -> Ready:
        ready = None
        while ready is None:
            for message in await worker.receive():
                if isinstance(message, Ready):
                    ready = message
                else:
                    self._deliver(message)
        return ready

    async def _listen(self, worker: RunningWorker) -> None:
        """Deliver messages until the worker is gone, and then its loss, once."""
        notice = None
        if isinstance(worker, TemporaryWorker):
            notice = asyncio.create_task(self._pass_notice(worker))
        try:
            while True:
                for message in await self._next(worker):
                    self._deliver(message)
        except EOFError as error:
            reason = _with_flaw(await worker.end(LOSS_GRACE_S), error)
        except WireError as error:
            await worker.end()
            reason = f"its worker sent no message of Seer's: {error}"
        except TimeoutError:
            await worker.end()
            limit_s, chunks = self.spec.silence_timeout_s, self._sent
            reason = f"silent for silence_timeout_s = {limit_s:g} with {chunks} chunks"
        finally:
            if notice is not None:
                notice.cancel()
        self._keeps_log = True
        self.worker = self._listener = None
        self._fail_calls(reason)
        self._lost(reason)

    async def _next(self, worker: RunningWorker) -> list[FromWorker]:
        """Wait for the next messages.

        Only time in which the worker has chunks, and in which this loop would have received something, is
        silence: a turn that took longer than it should is not counted, for the loop was blocked, and what the
        worker sent meanwhile is read next.

        Raises:
            TimeoutError: the worker has sent no byte for ``silence_timeout_s``.
        """
        silence_s = self.spec.silence_timeout_s
        turn_s = min(LONGEST_TURN_S, silence_s / 4)
        silent_s = 0.0
        while True:
            begun_s, received = monotonic(), worker.received_bytes
            try:
                # Not wait_for: on Python 3.11 it can swallow the cancellation that ``close`` relies on.
                async with asyncio.timeout(turn_s if silent_s < silence_s else 0):
                    return await worker.receive()
            except TimeoutError:
                if not self._sent or worker.received_bytes != received:
                    silent_s = 0.0
                elif silent_s >= silence_s:
                    raise
                elif monotonic() - begun_s < 2 * turn_s:
                    silent_s += monotonic() - max(begun_s, self._busy_since_s)

    def _deliver(self, message: FromWorker) -> None:
        if isinstance(message, Called):
            if not self._calls:
                raise WireError("an answer to no call")
            call = self._calls.popleft()
            if not call.done():
                call.set_result(message)
            return
        self._keeps_log |= isinstance(message, Degraded)
        self._receive(message)

    async def _pass_notice(self, worker: TemporaryWorker) -> None:
        reason = await worker.leaving()
        if self._sink is not None:
            self._sink.leaving(self.id, reason)

    def _fail_calls(self, reason: str) -> None:
        while self._calls:
            call = self._calls.popleft()
            if not call.done():
                call.set_result(Called(reason))


def _with_flaw(how: str, error: EOFError) -> str:
    """Return how a worker ended, and how its connection broke if it was not closed."""
    return f"{how}; {error}" if str(error) else how
