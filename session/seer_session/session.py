"""Rollouts without an event loop of the caller: the short form for scripts, sessions for trainers."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine, Iterable, Iterator, Mapping
from concurrent.futures import Future, InvalidStateError
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

from seer_host.config_files import Config, load_config

from seer_core.error_origin import describe_error
from seer_core.errors import SeerError
from seer_core.model import Completion
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.policy import Observer
from seer_core.ports.weights import WeightSpec
from seer_session.contained import Contained
from seer_session.environment import Environment
from seer_session.images import names_images
from seer_session.journal import Journal
from seer_session.results import RolloutResult
from seer_session.rollouts import Rollout
from seer_session.runtime import Runtime

__all__ = ["Session", "SessionRollout", "rollout"]

T = TypeVar("T")
NOT_RUNNING = "this session is not running; use it within `with Session(config) as session:`"
CLOSED = "this session was closed meanwhile"


class Session:
    """Engines that stay up between the steps of a trainer without an event loop.

    Use as a context manager, once: entering starts all engines, leaving stops them.  The event loop runs in a
    thread of the session's own, so methods may be called from any thread, but one at a time; an open
    rollout's at any time.  Errors are those of ``Runtime``.  Ctrl-C in the waiting thread ends the wait:
    unfinished requests are aborted and the engines are idle, or stopped on the way out of ``with``, before
    ``KeyboardInterrupt`` propagates.  Ctrl-C never comes in the session's thread: where code raises
    ``KeyboardInterrupt`` or ``SystemExit`` there, the waiting thread gets a SeerError that names it.
    """

    def __init__(
        self,
        config: Config | str | Path,
        observers: Iterable[Observer] = (),
        *,
        journal: Journal | None = None,
    ) -> None:
        """Read the configuration or its file, and add observers; nothing is started yet.

        ``journal`` is that of all rollouts that are given none; the caller closes it after the session.

        Raises:
            ConfigError, PluginError: as ``Runtime.from_config``.
        """
        self._config = config if isinstance(config, Config) else load_config(config)
        self._observers = tuple(observers)
        self.runtime = Runtime.from_config(self._config, self._observers)
        self._journal = journal
        self._pid = os.getpid()
        self._rollout: Rollout | None = None
        self._in_use = threading.Lock()
        self._closing = threading.Lock()
        self._gate = threading.Lock()  # closes the way into the loop before the loop ends
        self._waits: set[Future[Any]] = set()
        self._doing = ""
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._over: asyncio.Event | None = None

    def __enter__(self) -> Session:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start all engines; the same as entering.

        Raises:
            SeerError: as ``Runtime.start``, or this session has been started before.
        """
        if self._thread is not None:
            raise SeerError("this session has been started before; make another one")
        ready: Future[None] = Future()
        self._thread = threading.Thread(target=self._live, args=[ready], name="seer-session", daemon=True)
        self._thread.start()
        ready.result()
        try:
            with self._use("starting its engines"):
                self._call(self.runtime.start())
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop all engines, also from another thread than the one that rolls out; idempotent.

        In a process that was forked off it does nothing: the engines and the thread are the parent's.
        """
        if os.getpid() != self._pid:
            return
        with self._closing:
            loop, thread = self._loop, self._thread
            if loop is None or thread is None:
                return
            try:
                self._call(self.runtime.stop(), finish=True)
            finally:
                assert self._over is not None
                with self._gate, suppress(RuntimeError):  # the thread has died
                    self._loop = None
                    loop.call_soon_threadsafe(self._over.set)
                thread.join()

    @property
    def weight_version(self) -> int:
        """The version of the weights that completions are made with."""
        return self.runtime.weight_version

    @property
    def result(self) -> RolloutResult:
        """The finished responses of the latest rollout, with a summary.

        Raises:
            SeerError: nothing has been rolled out.
        """
        if self._rollout is None or not self._rollout.submitted:
            raise SeerError("this session has rolled out nothing yet")
        if self._loop is None or threading.current_thread() is self._thread:
            return self._rollout.result
        return self._call(_result(self._rollout))

    def rollout(
        self,
        records: Iterable[Mapping[str, Any]],
        iteration: int | None = None,
        *,
        journal: Journal | None = None,
        environment: Environment | None = None,
    ) -> RolloutResult:
        """Roll out prompts and return the whole result; see ``Runtime.groups`` for the arguments.

        ``journal`` and ``environment`` are those of ``Runtime.open``; give the ``iteration`` with a journal,
        for it enters the seeds.
        """
        with self.open(journal=journal, environment=environment) as rollout:
            rollout.add(records, iteration)
            return rollout.wait()

    def stream(
        self,
        records: Iterable[Mapping[str, Any]],
        iteration: int | None = None,
        *,
        keep: bool = True,
        journal: Journal | None = None,
        environment: Environment | None = None,
    ) -> Iterator[Completion]:
        """Roll out prompts and yield completions as they finish.

        The rollout begins with the first ``next``, and engines go on while the caller works.  Leaving early
        aborts the unfinished requests.  ``keep`` is that of ``Runtime.rollout``; ``journal`` and
        ``environment`` are those of ``rollout``.
        """
        with self.open(keep=keep, journal=journal, environment=environment) as rollout:
            rollout.add(records, iteration)
            rollout.close()
            yield from rollout

    @contextmanager
    def open(
        self,
        *,
        keep: bool = True,
        most_requests: int | None = None,
        journal: Journal | None = None,
        environment: Environment | None = None,
    ) -> Iterator[SessionRollout]:
        """Begin a rollout that takes prompts until it is closed; see ``Runtime.open``.

        Leaving ``with`` closes it and aborts the unfinished requests.
        """
        with self._use("rolling out"):
            try:
                journal = self._journal if journal is None else journal
                begin = _soon(
                    self.runtime.open,
                    keep=keep,
                    most_requests=most_requests,
                    journal=journal,
                    environment=environment,
                )
                self._rollout = self._call(begin)
                yield SessionRollout(self, self._rollout)
            finally:
                self._leave()

    def update_weights(self, source: str | Path | WeightSpec, version: int | None = None) -> int:
        """Load new weights into every engine and return their version; see ``Runtime.update_weights``.

        Ctrl-C takes effect once they are loaded, so that all engines have the same weights.
        """
        with self._use("updating weights"):
            return self._call(self.runtime.update_weights(source, version), finish=True)

    def weights_changed(self, version: int | None = None) -> int:
        """Serve weights that the servers' owner has loaded into them; see ``Runtime.weights_changed``."""
        with self._use("looking at new weights"):
            return self._call(self.runtime.weights_changed(version), finish=True)

    def reset_strategies(self) -> None:
        """Replace the strategies by fresh ones; see ``Runtime.renew_strategies``."""
        with self._use("renewing its strategies"):
            self._call(self.runtime.renew_strategies(self._config, self._observers), finish=True)

    def sleep(self) -> int:
        """Let all instances give memory back until ``wake``; return the bytes; see ``Runtime.sleep``.

        Ctrl-C takes effect once they sleep, or, in ``wake``, once they are awake.
        """
        with self._use("putting its engines to sleep"):
            return self._call(self.runtime.sleep(), finish=True)

    def wake(self) -> None:
        """Let all instances take their memory again; see ``Runtime.wake``."""
        with self._use("waking its engines"):
            self._call(self.runtime.wake(), finish=True)

    def submit(self, work: Coroutine[Any, Any, T]) -> Future[T]:
        """Run a coroutine beside what is under way, in the session's own event loop; never blocks.

        It serves what commands the ``runtime`` while another thread rolls out, such as a pause of its
        ``current`` rollout.

        Raises:
            SeerError: the session does not run.
        """
        with self._gate:
            if self._loop is None:
                work.close()
                raise SeerError(NOT_RUNNING)
            return asyncio.run_coroutine_threadsafe(Contained(work, _left_by), self._loop)

    def _leave(self) -> None:
        """Abort what is under way, without waiting where garbage is collected in the loop's own thread."""
        rollout, loop = self.runtime.current, self._loop
        if rollout is None or loop is None or os.getpid() != self._pid:
            return
        if threading.current_thread() is self._thread:
            loop.create_task(rollout.abort())
        else:
            self._call(rollout.abort())

    @contextmanager
    def _use(self, what: str) -> Iterator[None]:
        if not self._in_use.acquire(blocking=False):
            raise SeerError(
                f"this session is {self._doing}; one thing at a time: wait for that, or close the stream"
            )
        self._doing = what
        try:
            yield
        finally:
            self._in_use.release()

    def _call(self, work: Coroutine[Any, Any, T], *, finish: bool = False) -> T:
        """Run a coroutine in the session's thread and wait for it.

        Ctrl-C cancels the coroutine, unless it must ``finish``, and is raised once it has ended.
        """
        loop = self._loop
        if loop is None:
            work.close()
            raise SeerError(NOT_RUNNING)
        if os.getpid() != self._pid:
            work.close()
            raise SeerError("a session works in the process that made it, not in one that was forked off")
        if threading.current_thread() is self._thread:
            work.close()
            raise SeerError("a session cannot wait in its own thread; call it from one of yours")
        outcome: Future[T] = Future()
        task: asyncio.Task[T] | None = None

        def begin() -> asyncio.Task[T]:
            nonlocal task
            task = loop.create_task(Contained(work, _left_by))
            task.add_done_callback(lambda task: _settle(outcome, task))
            return task

        def interrupt() -> None:
            begun = task or begin()  # Ctrl-C may have come before
            if not finish:
                begun.cancel()

        try:
            with self._gate:
                if self._loop is None:
                    work.close()
                    raise SeerError(NOT_RUNNING)
                self._waits.add(outcome)
                loop.call_soon_threadsafe(begin)
            return outcome.result()
        except asyncio.CancelledError:
            raise SeerError(CLOSED) from None
        except KeyboardInterrupt:
            loop.call_soon_threadsafe(interrupt)
            outcome.exception()
            raise
        finally:
            self._waits.discard(outcome)

    def _live(self, ready: Future[None]) -> None:
        """Run the event loop until ``close``; however it ends, no other thread waits for it any more."""
        try:
            with asyncio.Runner() as runner:
                loop, over = runner.get_loop(), asyncio.Event()
                self._loop, self._over = loop, over
                ready.set_result(None)
                try:
                    self._run(loop, over)
                except BaseException as error:
                    self._end_waits(f"the thread of this session died of {describe_error(error, __name__)}")
                    raise
        except BaseException as error:
            if ready.done():
                raise
            ready.set_exception(SeerError(f"no event loop: {describe_error(error, __name__)}"))
        finally:
            self._end_waits(CLOSED)

    def _run(self, loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
        """Run an event loop, also on after an error that has left it: engines have to be stopped."""
        while not over.is_set():
            try:
                loop.run_until_complete(over.wait())
            except BaseException as error:
                loop.call_soon(self._interrupted, error)

    def _end_waits(self, reason: str) -> None:
        with self._gate:
            self._loop = None
        for outcome in tuple(self._waits):
            with suppress(InvalidStateError):  # it has ended
                outcome.set_exception(SeerError(reason))

    def _interrupted(self, error: BaseException) -> None:
        """End the rollout under way: what ran when the event loop was left has not been done whole."""
        failure = _left_by(error)
        failure.__cause__ = error
        self.runtime._controller.fail(failure)


class SessionRollout:
    """An open rollout of a session: a ``Rollout`` whose methods wait, and may be called from any thread.

    Iterate over it for completions, as they finish; several threads may share them out.
    """

    def __init__(self, session: Session, rollout: Rollout) -> None:
        self._call = session._call
        self._runtime = session.runtime
        self._rollout = rollout
        self._adding = asyncio.Lock()
        """Held from the naming of groups, which goes by those before them, until they are added."""

    def add(self, records: Iterable[Mapping[str, Any]], iteration: int | None = None) -> None:
        """Roll out these prompts as well, once there is room; for the arguments see ``Runtime.groups``."""
        self._call(self._add(list(records), iteration))

    async def _add(self, records: Iterable[Mapping[str, Any]], iteration: int | None) -> None:
        records = list(records)
        async with self._adding:
            if any(map(names_images, records)):
                groups = await asyncio.to_thread(self._runtime.groups, records, iteration)
            else:
                groups = self._runtime.groups(records, iteration)
            await self._rollout.room(sum(group.n for group in groups))
            self._rollout.add(groups)

    def close(self) -> None:
        """Take no more prompts: iterating ends once everything is over.  Idempotent."""
        self._call(_soon(self._rollout.close))

    def abort_request(self, request_id: str) -> None:
        """Abort one request; see ``Rollout.abort_request``."""
        self._call(_soon(self._rollout.abort_request, request_id))

    def abort_group(self, group_id: str) -> None:
        """Abort all unfinished requests of a group."""
        self._call(_soon(self._rollout.abort_group, group_id))

    def forget(self, name: str) -> None:
        """Drop what is kept of a trajectory or a family; see ``Runtime.forget``."""
        self._call(_soon(self._runtime.forget, name))

    def written(self, places: Mapping[str, int]) -> dict[str, tuple[Tokens, Logprobs]]:
        """Return what unfinished requests have, each from a place on, by their ids; also after an error.

        See ``Rollout.written``.
        """
        return self._call(_soon(self._written, places))

    def _written(self, places: Mapping[str, int]) -> dict[str, tuple[Tokens, Logprobs]]:
        rollout = self._rollout
        return {name: rollout.written(name, at) for name, at in places.items() if name in rollout.unfinished}

    def wait(self) -> RolloutResult:
        """Close it, and return the whole result once everything has finished."""
        self.close()
        return self._call(self._rollout.wait())

    def __iter__(self) -> Iterator[Completion]:
        while (completion := self._call(_next(self._rollout))) is not None:
            yield completion


async def _soon(call: Callable[..., T], *arguments: Any, **more: Any) -> T:
    return call(*arguments, **more)


def _left_by(error: BaseException) -> SeerError:
    return SeerError(f"the event loop of this session was left by {describe_error(error, __name__)}")


def _settle(outcome: Future[T], task: asyncio.Task[T]) -> None:
    if outcome.done():
        return
    if task.cancelled():
        outcome.set_exception(asyncio.CancelledError())
    elif (error := task.exception()) is not None:
        outcome.set_exception(error)
    else:
        outcome.set_result(task.result())


async def _result(rollout: Rollout) -> RolloutResult:
    return rollout.result


async def _next(rollout: Rollout) -> Completion | None:
    return await anext(rollout, None)


def rollout(
    config: Config | str | Path,
    records: Iterable[Mapping[str, Any]],
    iteration: int = 0,
    observers: Iterable[Observer] = (),
    environment: Environment | None = None,
) -> RolloutResult:
    """Start engines, roll out prompts, stop engines, return the result: the short form for scripts.

    ``records`` have the fields of a prompts file's lines.  A script that trains gives the number of its
    ``iteration``: the same prompts get the same responses where it is the same.  ``environment`` is that of
    ``Runtime.open``.  Call it where no event loop runs; with one, use ``Runtime``.  To keep the engines
    between two iterations, use ``Session``.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise SeerError(
            "seer_session.rollout() runs an event loop of its own, and one is running here already; use"
            " `async with Runtime.from_config(config) as runtime` instead"
        )

    async def run() -> RolloutResult:
        async with Runtime.from_config(config, observers) as runtime:
            groups = runtime.groups(records, iteration)
            return await runtime.rollout(groups, environment=environment).wait()

    return asyncio.run(run())
