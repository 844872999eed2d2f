"""The driver: what a user starts, rolls out with, gives new weights to, and stops."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Coroutine, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeVar

import structlog

from seer_core.errors import EngineError, SeerError, WeightVersionError, forget_interrupts
from seer_core.model import InstanceInfo
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.drafting import Drafter
from seer_core.ports.engine import Clock, InstanceClient, ModelInfo, Tokenizer
from seer_core.ports.extension import MakeExtender
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import OWNER, WeightSpec, WeightStore, directory
from seer_core.runtime.controller import RolloutController
from seer_core.runtime.restarts import RestartsTable
from seer_core.runtime.rollout import CoreRollout, MakeRollout
from seer_core.runtime.transcripts import ReadText
from seer_core.scheduling.scheduler import Slot

__all__ = ["Driver"]

log = structlog.get_logger("seer")

T = TypeVar("T")


class Driver:
    """A fleet of engines, a scheduler and a clock; one rollout at a time, of a batch or open.

    Use as an async context manager: entering starts all engines in parallel, leaving stops them.
    """

    def __init__(
        self,
        assembly: Assembly,
        restarts: RestartsTable = RestartsTable(),  # noqa: B008, immutable
        max_chunk_failures: int = 3,
        weights: WeightStore | None = None,
        read_text: ReadText | None = None,
        *,
        debug: bool = False,
    ) -> None:
        """Start nothing; ``weights`` keeps those of updates, ``read_text`` gives completions their text.

        A request whose chunks have failed more than ``max_chunk_failures`` times on living instances ends in
        an error.  In ``debug`` any failure of an observer fails the rollout.
        """
        _log_on_standard_error()
        self._controller = RolloutController(
            assembly, restarts, max_chunk_failures, weights or WeightStore(), read_text, debug=debug
        )
        self._fleet = self._controller.fleet
        self._started = False

    @property
    def model(self) -> ModelInfo:
        """The limits that prompts must respect."""
        return self._fleet.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer; without one, prompts must be token ids."""
        return self._fleet.tokenizer

    @property
    def alive(self) -> Mapping[str, InstanceInfo]:
        """The instances that take chunks, by id."""
        return self._fleet.alive

    @property
    def engines(self) -> Mapping[str, InstanceClient]:
        """All instances by id, also those that are down."""
        return self._fleet.engines

    @property
    def clock(self) -> Clock:
        """The clock on which the engines run."""
        return self._fleet.clock

    @property
    def asleep(self) -> bool:
        """Whether the instances sleep, or are about to, or about to wake."""
        return self._fleet.asleep

    @property
    def places_missing(self) -> Mapping[str, str]:
        """Why instances have no place, where none is alive nor about to be; empty otherwise."""
        return self._fleet.places_missing

    @property
    def drafter(self) -> Slot[Drafter] | None:
        """The drafter that instances use, if any."""
        return self._fleet.drafter

    @property
    def kv_pool(self) -> Slot[KVPool] | None:
        """The KV pool that instances share, if any."""
        return self._fleet.kv_pool

    @property
    def strategies_failed(self) -> bool:
        """Whether a rollout failed midway, so that no other can begin until ``use``."""
        return self._controller.strategies_failed

    @property
    def current(self) -> CoreRollout | None:
        """The rollout under way, if any."""
        return self._controller.rollout

    @property
    def iteration(self) -> int:
        """The number of rollouts closed so far, which enters the default seeds of the current or next one."""
        return self._controller.iteration

    @property
    def weight_version(self) -> int:
        """The version of the weights that completions are made with: 0 until weights are updated."""
        return self._fleet.weights.current.version

    @property
    def weight_source(self) -> WeightSpec:
        """The weights of that version, as they were given to ``update_weights``."""
        return self._fleet.weights.current.source

    def require_alive(self) -> None:
        """Raise EngineError unless an instance is alive or is being started again."""
        self._fleet.require_alive()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start observers, KV pool, then all engines in parallel; if one fails, stop all and raise.

        May be called again after ``stop``.

        Raises:
            SeerError: it has been started already, or a rollout failed midway, so it needs other strategies.
            EngineError: an engine did not start, or cannot draft or share KV.
            PluginError: an observer or the KV pool did not start.
            ConfigError: a plug-in finds that an instance does not suit its settings.
        """
        if not self._fleet.engines:
            raise EngineError("the engine plug-in made no engines; set its `instances` to 1 or more")
        if self._started:
            raise SeerError("the runtime has been started already; stop it before it can start again")
        self._controller.expect_healthy()
        self._started = True
        try:
            await self._controller.observers.start()
            await self._fleet.start()
        except BaseException:
            await self.stop()
            raise
        self._controller.log_chunk_lengths()

    async def stop(self) -> None:
        """End all engines, KV pool and observers, delete the copy of the weights; idempotent."""
        await self._end()
        await self._fleet.weights.close()
        forget_interrupts()  # also those that code of users has caught itself

    async def _end(self) -> None:
        """End what ``start`` started."""
        self._controller.fail(EngineError("the engines were stopped before the rollout had finished"))
        await self._fleet.stop()
        await self._controller.stop()
        self._started = False

    async def use(
        self, strategies: Strategies, kv_pool: Slot[KVPool] | Literal["keep"] | None = "keep"
    ) -> None:
        """Use other strategies, and another KV pool or none unless it is to ``keep`` its own, from now on.

        Where the drafter or the pool changes, engines are started anew.

        Raises:
            EngineError, PluginError: as ``start``; the runtime is stopped then.
        """
        self._controller.require_idle("change the strategies")
        fleet = self._fleet
        pool = fleet.kv_pool if isinstance(kv_pool, str) else kv_pool
        anew = fleet.alive and (strategies.drafter is not fleet.drafter or pool is not fleet.kv_pool)
        if anew:
            await self._end()
        await self._controller.stop()
        fleet.drafter, fleet.kv_pool = strategies.drafter, pool
        self._controller.use(strategies)
        if anew:
            await self.start()
            return
        if self._started:
            try:
                await self._controller.observers.start()
            except BaseException:
                await self._end()
                raise
        self._controller.introduce_instances()

    async def add(self, engine: InstanceClient) -> InstanceInfo:
        """Start one more instance, also while a rollout runs; it shares KV if the pool makes room for it.

        Raises:
            SeerError: the runtime has not been started.
            EngineError: its id is taken, it did not start, or the instances sleep or were stopped meanwhile.
        """
        if not self._started:
            raise SeerError("the runtime has not been started; enter it before adding an instance")
        return await self._fleet.add(engine)

    async def remove(self, instance_id: str, by: str = "") -> None:
        """End an instance for good, also while a rollout runs; others take over its chunks.

        ``by`` names the person or program that asked for it, in the trace.

        Raises:
            EngineError: there is no such instance.
        """
        await self._fleet.remove(instance_id, by)

    def limit(self, instance_id: str, max_running: int, by: str = "") -> None:
        """Send an instance no chunk while so many run there, also while a rollout runs, until it starts anew.

        Placers that fill engines' own queues, as veRL's does, do not heed it.  ``by`` names the person or
        program that asked for it, in the trace.

        Raises:
            EngineError: no such instance is up, or its engine cannot run so many.
        """
        self._fleet.limit(instance_id, max_running, by)

    def forget(self, name: str) -> None:
        """Drop what is kept of a trajectory, its KV, or of a family, its texts; an unknown name is no error.

        Groups of it that are unfinished, or come later, are rolled out all the same.
        """
        self._controller.forget(name)

    async def reset_caches(self) -> None:
        """Let every engine, and the pool, forget all KV, so that the next rollout starts cold.

        A drafter that drafts from responses of earlier rollouts recalls none of them any more.
        """
        self._controller.require_idle("reset caches")
        self._controller.forget_kv()
        await self._fleet.reset_caches()

    async def update_weights(self, source: str | Path | WeightSpec, version: int | None = None) -> int:
        """Load new weights into every engine and return their version; nothing may be in flight.

        ``version`` is the trainer's, such as the number of its step; without one it is the next.
        ``source`` is a directory of safetensors, or names another ``WeightSource``.  Of a directory engines
        load a copy, which is kept until the next update; the caller keeps what another source reads until
        then.  PEFT's files of an adapter belong to the whole weights before it, which are kept as long as
        adapters come.  An instance that cannot load what others could, or that then has another fingerprint
        than most, is lost, and comes back with the new weights.  One that is just being started again gets
        them as it comes up, and is waited for only if no other is alive.  A cancellation takes effect once
        the update has ended, so that all instances serve the same weights.

        Raises:
            SeerError: the instances are asleep.
            WeightVersionError: a rollout or another update is under way, or the version is no higher than
                the current one, so versions would mix.
            EngineError: the weights could not be kept, or no instance could load them; the old ones stay.
        """
        self._controller.require_idle("update weights", WeightVersionError)
        spec = source if isinstance(source, WeightSpec) else directory(source)
        if not self.alive and spec.path != OWNER:
            await self._settle("update weights", WeightVersionError)
        self._controller.forget_kv()
        return await _to_its_end(self._fleet.update_weights(spec, version))

    async def weights_changed(self, version: int | None = None) -> int:
        """Serve weights that the owner of the servers has loaded into them, and return their version.

        It is for servers that run already and belong to others; each is looked at, and one whose
        weights differ from the others' is lost until they are the same.  Where all are away or paused they
        are looked at as they return.  ``version`` and errors are those of ``update_weights``.
        """
        return await self.update_weights(WeightSpec(OWNER, {}), version)

    async def sleep(self) -> int:
        """Let all instances give memory back until ``wake``, and return how many bytes that gave.

        It serves a trainer on the same devices.  Instances forget all KV; the KV pool keeps its own.  The
        documentation of an engine says which memory it gives back; 0 bytes means none.  Calls that need the
        instances raise until ``wake``.  An instance lost asleep starts again once the others wake.  If the
        instances sleep already, or are just waking, nothing is done.

        Raises:
            SeerError: a rollout or an update is under way.
            EngineError: an instance refuses; all are awake then.
        """
        if self._fleet.asleep:
            return 0
        await self._settle("put the instances to sleep", need_one=False)
        self._controller.forget_kv()
        return await self._fleet.sleep()

    async def wake(self) -> None:
        """Let all instances take their memory again: ready for new weights, or for a rollout by the old ones.

        An instance that cannot is lost and starts again.  If they are awake, nothing is done.
        """
        await self._fleet.wake()

    def open(
        self,
        *,
        most_requests: int | None = None,
        make_extender: MakeExtender | None = None,
        make_rollout: MakeRollout = CoreRollout,
    ) -> CoreRollout:
        """Begin a rollout that takes groups until it is closed; iterate over it for completions.

        It takes at most ``most_requests`` unfinished requests at a time, if that is given.  If
        ``make_extender`` is given, responses are held at each stop, and what it makes extends them.

        Raises:
            SeerError: something else is under way, the instances sleep, or the last rollout failed midway.
        """
        return self._controller.begin(make_rollout, most_requests, make_extender)

    async def _settle(self, what: str, error: type[SeerError] = SeerError, *, need_one: bool = True) -> None:
        """Wait for instances that are being started again; nothing else may be under way, nor begin."""
        self._controller.require_idle(what, error)
        await self._fleet.restarts_over(need_one=need_one)
        self._controller.require_idle(what, error)


def _log_on_standard_error() -> None:
    """Keep the log off standard output, the program's own, unless the program configures structlog."""
    if not structlog.is_configured():
        # Standard error as it is then: programs replace it for a while.
        structlog.configure(logger_factory=lambda *names: structlog.WriteLogger(sys.stderr))


async def _to_its_end(work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns; a cancellation is raised once it has ended."""
    task = asyncio.ensure_future(work)
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.wait([task])
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("cancelled_work_failed", error=str(error))
        raise
