"""The launcher ``ray``: for each worker a place on a node, and a supervisor there that starts it.

Ray carries launches, logs and ends.  All else goes by the worker's own connection.
"""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import ray
import structlog
from ray.exceptions import ActorDiedError, ActorUnavailableError, GetTimeoutError
from seer_host.json_files import describe_flaw
from seer_host.threads import in_thread
from seer_worker.client.worker_log import WorkerLog
from seer_worker.client.worker_port import WorkerPort
from seer_worker.wire import Channel, FromWorker, Shutdown

from seer_core.error_origin import one_line
from seer_core.errors import EngineError, NoPlaceError
from seer_core.ports.weights import WeightSpec
from seer_ray import cluster, places
from seer_ray.places import Place
from seer_ray.settings import TABLE, Settings
from seer_ray.supervisor import Started
from seer_ray.watch import Watch
from seer_ray.weights import NodeWeights

__all__ = ["RayLauncher", "RayWorker"]

log = structlog.get_logger("seer")

T = TypeVar("T")

BringWeights = Callable[[WeightSpec], AbstractAsyncContextManager[WeightSpec]]

JOIN_S = 120.0
RAY_CALL_S = 10.0
"""The limit for a call that only asks the cluster's head."""
WAIT_TURN_S = 1.0
FIRST_REPORT_S = 2.0
REPORT_INTERVAL_S = 30.0
"""A wait for a place is logged after ``FIRST_REPORT_S``, and then this often."""
SUPERVISOR_S = 15.0
"""How long an actor may take to start if another node has room; Ray notices a death as late."""
LAST_WORD_S = 0.5
"""How long the exit status may take of a worker whose connection has ended, before it is lost without."""


class RayLauncher:
    """Starts workers where the cluster has a place for them."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._port: WorkerPort | None = None
        self._users = 0
        self._weights = NodeWeights(settings.launch_timeout_s)
        self._sought: set[str] = set()
        self._head = ""
        self._watch: Watch | None = None
        self._last_watch: Watch | None = None
        self._watching = 0

    async def address(self) -> str:
        """Return this machine's address in the cluster, unless the settings name another."""
        return self._settings.host or await self._join()

    async def find_place(self, name: str, waiting: Callable[[str], None]) -> None:
        """Wait until a node has room for an instance; log what is missing meanwhile, and pass it on.

        Raises:
            EngineError: the cluster's head is gone, and no worker is left that could end the rollout.
        """
        self._sought.add(name)
        await self._join()
        self._begin_watch()
        try:
            await self._head_there(name, waiting)
            place = await self._place(name, waiting)
            # Given back at once: an instance that then waits for the others to wake must not keep devices.
            await _ask(place.release)
        finally:
            self._end_watch()

    async def _head_there(self, name: str, waiting: Callable[[str], None]) -> None:
        """Wait for a head that is gone for as long as some worker goes on without it."""
        waited = False
        while silent_s := self._silent_s:
            if not self._users:
                raise EngineError(self._headless(silent_s))
            if not waited:
                waited = True
                waiting(self._headless(silent_s))
                log.warning(
                    "instance_waits_for_head", instance=name, head=self._head, seconds=round(silent_s)
                )
            await asyncio.sleep(WAIT_TURN_S)

    @property
    def _silent_s(self) -> float:
        return 0.0 if self._watch is None else self._watch.silent_s

    def _headless(self, silent_s: float) -> str:
        return (
            f"the head of the Ray cluster at {self._head} has not answered for {silent_s:.0f} s; start the"
            " cluster again"
        )

    def _begin_watch(self) -> None:
        self._watching += 1
        if self._watch is None:
            self._watch = Watch(cluster.draining, self._last_watch)

    def _end_watch(self) -> None:
        self._watching -= 1
        if not self._watching and self._watch is not None:
            self._watch.end()
            self._last_watch, self._watch = self._watch, None

    async def launch(
        self, name: str, interpreter: str, environment: Mapping[str, str], log: Path, keep_log: bool
    ) -> RayWorker:
        """Start a worker on a node, and on another one if that does not answer."""
        worker_log = WorkerLog(log, keep_log)
        silent: list[str] = []
        while True:
            try:
                return await self._launch(name, interpreter, environment, worker_log, silent)
            except cluster.SilentNodeError as error:
                silent.append(error.node_id)
                if not await _ask(places.has_room, self._settings, silent):
                    raise
                _note_silence(name, error)
            except places.TakenPlaceError:
                pass

    async def _launch(
        self,
        name: str,
        interpreter: str,
        environment: Mapping[str, str],
        worker_log: WorkerLog,
        silent: Sequence[str],
    ) -> RayWorker:
        """Start a worker on a node that is not among the silent ones."""
        host = await self._join()
        if silent_s := self._silent_s:
            raise EngineError(self._headless(silent_s))
        place = await self._place(name, avoided=silent)
        try:
            port = await self._listen(host)
        except BaseException:
            _behind(place.release)
            raise
        expected = port.expect()
        try:
            python = "" if interpreter == sys.executable else interpreter
            address = (port.host, port.port)
            started, supervisor = await self._start_supervisor(
                place, python, environment, address, expected.secret, silent
            )
            output = await _ask(supervisor.watch.options(num_returns="streaming").remote)
            ended = asyncio.create_task(_copy_output(output, worker_log.open()))
            either: set[asyncio.Future[Any]] = {expected.streams, ended}
            limit_s = self._settings.launch_timeout_s
            await asyncio.wait(either, timeout=limit_s, return_when=asyncio.FIRST_COMPLETED)
            if not expected.streams.done():
                raise EngineError(self._silence(started, address, ended, worker_log))
            reader, writer = expected.streams.result()
        except BaseException:
            port.forget(expected)
            self._leave()
            _behind(place.release)
            raise
        assert self._watch is not None
        self._sought.discard(name)
        bring = partial(self._weights.on_node, started=started, supervisor=supervisor, port=port)
        return RayWorker(
            reader, writer, started, place, supervisor, ended, worker_log, self._leave, bring, self._watch
        )

    async def _join(self) -> str:
        """Return this machine's address in the cluster."""
        host = await _ask(cluster.join, self._settings, limit_s=JOIN_S)
        self._head = self._head or await _ask(cluster.address)
        return host

    async def _listen(self, host: str) -> WorkerPort:
        """Return the open port; ``_leave`` must follow."""
        settings = self._settings
        if self._port is None:
            try:
                self._port = WorkerPort(settings.host or host, settings.port)
            except OSError as error:
                raise EngineError(
                    f"workers cannot connect to {settings.host or host}, port {settings.port}:"
                    f" {describe_flaw(error)}; correct host and port in [{TABLE}]"
                ) from error
        self._users += 1
        self._begin_watch()
        try:
            await self._port.open()
        except BaseException:
            self._leave()
            raise
        return self._port

    def _leave(self) -> None:
        self._users -= 1
        self._end_watch()
        if self._users == 0 and self._port is not None:
            self._port.close()
            self._port = None

    async def _place(
        self, name: str, waiting: Callable[[str], None] | None = None, avoided: Sequence[str] = ()
    ) -> Place:
        """Return a reserved place; without ``waiting``, give up where there is none, or can be none."""
        patient = waiting is not None
        limit_s = self._settings.launch_timeout_s
        begun_s, report_s = time.monotonic(), FIRST_REPORT_S
        place = await self._reserve(name, avoided)
        try:
            while not await _ask(place.wait, WAIT_TURN_S):
                waited_s = time.monotonic() - begun_s
                optional = name in self._sought or 0 < self._settings.min_instances <= self._users
                if not patient and optional and waited_s >= FIRST_REPORT_S:
                    raise NoPlaceError("the Ray cluster has no place for it; it joins when a node has room")
                if waited_s >= report_s or (waited_s >= limit_s and not patient):
                    report_s = waited_s + REPORT_INTERVAL_S
                    missing = await _ask(places.shortage, self._settings)
                    impossible = await _ask(places.lacking, self._settings)
                    why = f"the Ray cluster has no place for it: {impossible or missing}"
                    hopeless = impossible is not None and not self._settings.autoscaler
                    if not patient and (hopeless or waited_s >= limit_s):
                        more = "bundle" if self._settings.placement_groups else "node"
                        raise EngineError(
                            f"{why}; add a {more}, or lower what [{TABLE}] asks for, or `instances`, or let"
                            f" {TABLE}.min_instances begin without the others, or set {TABLE}.autoscaler"
                            " where Ray adds nodes"
                        )
                    if waiting is not None:
                        waiting(impossible or missing)
                    log.warning(
                        "instance_waits_for_place",
                        instance=name,
                        missing=impossible or missing,
                        seconds=round(waited_s),
                    )
        except BaseException:
            _behind(place.release)
            raise
        return place

    async def _reserve(self, name: str, avoided: Sequence[str]) -> Place:
        """Return a place that is asked for; one that a late answer brings is given back."""
        given_up = threading.Event()

        def reserve() -> Place:
            place = places.reserve(self._settings, name, avoided)
            if given_up.is_set():
                place.release()
            return place

        try:
            return await _ask(reserve)
        except BaseException:
            given_up.set()
            raise

    async def _start_supervisor(
        self,
        place: Place,
        python: str,
        environment: Mapping[str, str],
        address: tuple[str, int],
        secret: bytes,
        silent: Sequence[str],
    ) -> tuple[Started, Any]:
        """Return what a supervisor has measured as it started the worker, and its handle."""
        limit_s = self._settings.launch_timeout_s

        def start() -> tuple[Started, Any]:
            node_id, end_s = place.node_id, time.monotonic() + limit_s
            supervisor = place.make_supervisor()
            answer = supervisor.start.remote(python, dict(environment), address, secret)
            while True:
                left_s = max(0.0, end_s - time.monotonic())
                try:
                    return Started(**ray.get(answer, timeout=min(left_s, SUPERVISOR_S))), supervisor
                except (GetTimeoutError, ActorDiedError, ActorUnavailableError) as error:
                    # A node that is merely slow is waited for, unless another one has room now.
                    elsewhere = places.has_room(self._settings, [*silent, node_id])
                    if elsewhere or left_s == 0.0 or not isinstance(error, GetTimeoutError):
                        raise cluster.SilentNodeError(node_id, type(error).__name__) from error

        started, supervisor = await _ask(start, limit_s=limit_s + RAY_CALL_S)
        if started.flaw:
            raise EngineError(
                f"node {started.host} cannot start a worker: {started.flaw}; `python` in its engine's table"
                " is a path on every node"
            )
        return started, supervisor

    def _silence(
        self, started: Started, address: tuple[str, int], ended: asyncio.Task[str], worker_log: WorkerLog
    ) -> str:
        """Return why a worker has not connected."""
        if ended.done():
            return f"its worker on node {started.host} {ended.result()}\n{worker_log.last_words()}"
        ended.cancel()
        return (
            f"its worker on node {started.host} has not connected to {address[0]}, port {address[1]}, within"
            f" {self._settings.launch_timeout_s:g} s; open that port, or correct [{TABLE}].host"
        )


def _note_silence(name: str, error: cluster.SilentNodeError) -> None:
    log.warning("node_starts_no_actor", instance=name, node=error.node_id, reason=str(error))


class RayWorker(Channel):
    """A ``RunningWorker`` on a node; ``started`` says where."""

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        started: Started,
        place: Place,
        supervisor: Any,
        ended: asyncio.Task[str],
        log: WorkerLog,
        leave: Callable[[], None],
        bring: BringWeights,
        watch: Watch,
    ) -> None:
        super().__init__(reader, writer)
        self.started = started
        self.scratch = started.scratch
        self.log = str(log.path)
        self._place, self._supervisor = place, supervisor
        self._ended, self._log, self._leave = ended, log, leave
        self._bring = bring
        self._watch = watch
        self._disconnected = self._released = False

    async def leaving(self) -> str:
        """Wait until the node is being drained; return why the worker has to leave."""
        await self._watch.notice(self.started.node_id).wait()
        return f"node {self.started.host} is being drained"

    async def receive(self) -> list[FromWorker]:
        """Wait for the next messages."""
        try:
            return await super().receive()
        except EOFError:
            self._disconnected = True
            raise

    def bring_weights(self, source: WeightSpec) -> AbstractAsyncContextManager[WeightSpec]:
        """Bring weights of this machine to its node, once for all workers there that load them now."""
        return self._bring(source)

    async def end(self, grace_s: float = 0.0) -> str:
        """Ask, wait ``grace_s``, end it by its supervisor; one that is disconnected is cleaned up behind."""
        if self._disconnected:
            await asyncio.wait({self._ended}, timeout=LAST_WORD_S)
        else:
            if grace_s > 0:
                self.send(Shutdown())
                await asyncio.wait({self._ended}, timeout=grace_s)
            if not self._ended.done():
                with suppress(EngineError):
                    await _ask(lambda: ray.get(self._supervisor.end.remote(), timeout=RAY_CALL_S))
                await asyncio.wait({self._ended}, timeout=LAST_WORD_S)
        if not self._released:
            self._released = True
            self._leave()
            self.close()
            if self._disconnected or self._watch.silent_s:
                _behind(self._place.release)
            else:
                with suppress(EngineError):
                    await _ask(self._place.release)
        if self._ended.done() and not self._ended.cancelled():
            how = self._ended.result()
        else:
            self._ended.cancel()
            how = "gave no exit status"
        return f"{how} on node {self.started.host}" if self.fatal is None else self.fatal

    def last_words(self) -> str:
        """Return the last lines of its log, unless the worker has sent the reason of its end."""
        return self._log.last_words() if self.fatal is None else self._log.place

    def discard_log(self) -> None:
        """Remove the log, and the directory with the last one in it."""
        self._log.discard()


async def _copy_output(output: Any, file: BinaryIO) -> str:
    """Append what a supervisor sends of its worker's output to a file; return how the worker ended."""
    with file:
        full = False
        try:
            async for reference in output:
                item = await reference
                if isinstance(item, str):
                    return item
                try:
                    if not full:
                        file.write(item)
                except OSError as error:  # a full disk takes no log, and ends no rollout
                    full = True
                    log.warning("worker_log_failed", log=file.name, error=describe_flaw(error))
        except Exception as error:  # Ray's own, of which some are no RayError once it shuts down
            return f"was lost with its supervisor ({type(error).__name__})"
    return "was lost with its supervisor"


async def _ask(call: Callable[..., T], *arguments: Any, limit_s: float = RAY_CALL_S) -> T:
    """Return what a call of Ray returns, from a thread.

    Raises:
        EngineError: the cluster does not answer, or refuses.
    """
    try:
        return await in_thread(limit_s, call, *arguments)
    except EngineError:
        raise
    except TimeoutError as error:
        raise EngineError(
            f"the Ray cluster has not answered within {limit_s:g} s; see `ray status`"
        ) from error
    except Exception as error:
        raise EngineError(
            f"Ray refuses: {type(error).__name__}: {one_line(error)}; see `ray status`"
        ) from error


def _behind(call: Callable[..., object], *arguments: Any) -> None:
    """Call something of Ray in a thread that is not waited for, and needs no event loop."""
    threading.Thread(target=call, args=arguments, name="seer-ray", daemon=True).start()
