"""The fleet: a run's instances from start to stop, their weights, and their KV pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import cast

import attrs
import structlog

from seer_core.errors import EngineError, NoPlaceError, OtherWeightsError, SeerError, quote
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Event,
    InstanceDegraded,
    InstanceFailed,
    InstanceLeaving,
    InstanceLimited,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    InstanceWaiting,
)
from seer_core.ports.clock import RealClock
from seer_core.ports.contracts import implemented
from seer_core.ports.drafting import Drafter, ResponseMemory
from seer_core.ports.engine import (
    ChangingFleet,
    ChunkOutput,
    ChunkPiece,
    EngineFleet,
    ForeignInstance,
    InstanceClient,
    ModelInfo,
    PlaceSeeker,
    Tokenizer,
)
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import OWNER, WeightSpec, WeightStore
from seer_core.runtime.observers import stop_strategy
from seer_core.runtime.restarts import LONGEST_PAUSE_S, MOST_DOUBLINGS, RestartBudget, RestartsTable
from seer_core.runtime.weights import WeightVersions
from seer_core.scheduling.scheduler import Slot

__all__ = ["END_CHUNKS_S", "Fleet", "FleetCalls"]

log = structlog.get_logger("seer")

END_CHUNKS_S = 2.0
"""How long chunks that are to end early may take: some steps, unless they wait for their first."""


@attrs.frozen
class FleetCalls:
    """The controller, as a fleet calls it: its engines' chunks go there directly."""

    chunk_finished: Callable[[str, ChunkOutput], None]
    chunk_failed: Callable[[str, str, str], None]
    chunk_streamed: Callable[[str, ChunkPiece], None]
    apply: Callable[[Event], None]
    """Take an event of a start; an error in a plug-in is raised and ends the start."""
    apply_guarded: Callable[[Event], None]
    """Take an event that an instance caused; an error ends the rollout and is not raised."""
    chunks_ended: Callable[[float, str], Awaitable[None]]
    """Wait, at most so many seconds, until an instance's chunks that are to end early have."""
    no_instances_left: Callable[[], None]
    """End the rollout: no instance is alive, and none is being started again."""


class Fleet:
    """Keeps instances alive: starts them, starts lost ones again, and gives them new weights.

    It is the sink of the engines; what they report of chunks goes to the controller directly.  ``alive`` are
    the instances that take chunks; ``failed`` holds the reasons why others stay down.  ``reports`` are the
    latest ones, and ``degradations`` all since an instance's start.  ``shares_sibling_tokens``: some
    instances draft from the tokens that siblings write on others.
    """

    def __init__(
        self,
        engines: EngineFleet,
        restarts: RestartsTable,
        controller: FleetCalls,
        weights: WeightStore,
        drafter: Slot[Drafter] | None = None,
        kv_pool: Slot[KVPool] | None = None,
    ) -> None:
        self.engines: dict[str, InstanceClient] = {engine.id: engine for engine in engines.engines}
        self.clock = engines.clock
        self._made = engines
        self.drafter = drafter
        self.kv_pool = kv_pool
        self.shares_sibling_tokens = False
        self.alive: dict[str, InstanceInfo] = {}
        self.end_token_ids: tuple[int, ...] = ()
        """The tokens with which all instances end a response, as far as they say."""
        self.failed: dict[str, str] = {}
        self.reports: dict[str, InstanceReported] = {}
        self.degradations: dict[str, list[InstanceDegraded]] = {}
        self.weights = WeightVersions(weights)
        self._controller = controller
        self.chunk_finished = controller.chunk_finished
        self.chunk_failed = controller.chunk_failed
        self.chunk_streamed = controller.chunk_streamed
        self._policy = restarts
        self._budget = RestartBudget(restarts)
        self._lives = 0
        self._lost_early: dict[str, str] = {}
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._following: asyncio.Task[None] | None = None
        self._without_place: set[str] = set()
        self._missing: dict[str, str] = {}
        """What each of them lacks."""
        self._astray: set[str] = set()
        """Servers that have other weights than their owner has loaded into the others."""
        self._looks: set[asyncio.Event] = set()
        """End the pauses of these, after which they are looked at again."""
        self._leaving: set[str] = set()
        self._restart_over = asyncio.Event()
        self._awake = asyncio.Event()
        self._awake.set()
        self._sleep_lock = asyncio.Lock()
        self._adding = 0
        self._joins: set[asyncio.Task[InstanceInfo]] = set()
        """The additions among them that the fleet of engines has asked for."""
        self._pool_started = False

    @property
    def model(self) -> ModelInfo:
        """The limits that prompts must respect, which may be asked of a server when they are first read."""
        return self._made.model

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The model's tokenizer, if there is one."""
        return self._made.tokenizer

    @property
    def memory(self) -> Slot[ResponseMemory] | None:
        """The drafter, if it drafts from responses of earlier rollouts and instances are sent those."""
        slot = self.drafter
        if slot is None or not self.shares_sibling_tokens or not isinstance(slot.strategy, ResponseMemory):
            return None
        return cast("Slot[ResponseMemory]", slot)

    @property
    def asleep(self) -> bool:
        """Whether the instances sleep, or are about to, or about to wake."""
        return not self._awake.is_set()

    @property
    def places_missing(self) -> Mapping[str, str]:
        """Why instances have no place, where none is alive nor about to be; empty otherwise."""
        if self.alive or self._restarts.keys() - self._without_place:
            return {}
        return {name: self._missing.get(name, "") for name in self._restarts}

    # Lives.

    async def start(self) -> None:
        """Start the KV pool, then all engines in parallel; after an error the caller stops the rest.

        Raises:
            EngineError: an engine did not start, or cannot draft or share KV.
            PluginError: the KV pool did not start.
            ConfigError: a plug-in finds that an instance does not suit its settings.
        """
        self._lost_early.clear()
        self.failed.clear()
        self._budget = RestartBudget(self._policy)
        await self._start_kv_pool()
        engines = self.engines.values()
        self.shares_sibling_tokens = False
        self._set_drafter(engines)
        begun_s = self.clock.now()
        if isinstance(self.clock, RealClock):
            log.info("starting_instances", instances=len(engines))
        starts = await asyncio.gather(*map(self._start, engines), return_exceptions=True)
        waiting: list[tuple[InstanceClient, NoPlaceError]] = []
        for engine, answer in zip(engines, starts, strict=True):
            if isinstance(answer, NoPlaceError):
                waiting.append((engine, answer))
                continue
            if isinstance(answer, BaseException):
                raise answer
            self._admit(answer)
            self._controller.apply(InstanceStarted(answer))
        if not self.alive and waiting:
            raise waiting[0][1]
        for engine, error in waiting:
            self._begin_restart(engine, str(error), planned=True)
        if isinstance(self.clock, RealClock):
            log.info("instances_started", took_s=round(self.clock.now() - begun_s, 1))
        for name, reason in self._lost_early.items():
            self.lost(name, reason)
        if isinstance(self._made, ChangingFleet):
            self._following = asyncio.ensure_future(self._made.follow(self._join, self.remove))
            self._following.add_done_callback(self._followed)

    def _followed(self, task: asyncio.Task[None]) -> None:
        """Log why no further instance joins or leaves."""
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("fleet_not_followed", error=f"{type(error).__name__}: {error}")

    async def stop(self) -> None:
        """End all engines and the KV pool; idempotent."""
        self._lives += 1
        tasks = list(self._restarts.values())
        if self._following is not None:
            tasks.append(self._following)
            self._following = None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._awake.set()
        names = list(self.alive)
        self.alive.clear()  # before they stop, so that none lost meanwhile is started again
        for name in (*names, *sorted(self._leaving)):
            self._controller.apply_guarded(InstanceStopped(name))
        self._leaving.clear()
        answers = await asyncio.gather(
            *(engine.stop() for engine in self.engines.values()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                log.error("instance_stop_failed", error=str(answer))
        if self.kv_pool is not None:
            await stop_strategy(self.kv_pool)

    async def add(self, engine: InstanceClient) -> InstanceInfo:
        """Start one more engine, also while a rollout runs; it shares KV if the pool makes room for it.

        Raises:
            EngineError: its id is taken, it did not start, the fleet is asleep or was stopped meanwhile.
        """
        if self.asleep:
            raise EngineError(f"the instances are asleep; wake them before {engine.id!r} joins them")
        if engine.id in self.engines:
            raise EngineError(f"there is an instance {engine.id!r} already; give the new one another id")
        life = self._lives
        self._adding += 1
        self.engines[engine.id] = engine
        self._lost_early.pop(engine.id, None)
        try:
            await self._share_kv(engine)
            self._set_drafter([engine])
            info = await self._start(engine)
            if life != self._lives or self.engines.get(engine.id) is not engine:
                raise EngineError(f"instance {engine.id!r} was taken away before it had started")
        except BaseException:
            if self.engines.get(engine.id) is engine:
                del self.engines[engine.id]
            await engine.stop()
            raise
        finally:
            self._adding -= 1
        self._admit(info)
        self._controller.apply_guarded(InstanceStarted(info))
        self._lose_early(info.id)
        return info

    async def _join(self, engine: InstanceClient) -> InstanceInfo:
        """Add an engine as ``add`` does, but leave it out for now if the others fall asleep meanwhile."""
        join = asyncio.ensure_future(self.add(engine))
        self._joins.add(join)
        try:
            return await join
        except asyncio.CancelledError:
            own = asyncio.current_task()
            if self.asleep and own is not None and not own.cancelling():
                raise EngineError(f"instance {engine.id!r} joins once the others are awake") from None
            raise
        finally:
            self._joins.discard(join)

    def limit(self, name: str, max_running: int, by: str = "") -> None:
        """Send an instance no chunk while so many run there, until it starts anew.

        Raises:
            EngineError: no such instance is up, or its engine cannot run so many.
        """
        info = self.alive.get(name)
        if info is None:
            raise self._no_instance(name, self.alive)
        if not 1 <= max_running <= info.max_running:
            raise EngineError(
                f"{quote(name)} runs 1 to {info.max_running} requests at once (max_running), and"
                f" {max_running} is outside that"
            )
        log.info("instance_limited", instance=name, max_running=max_running, by=by)
        self._controller.apply_guarded(InstanceLimited(name, max_running, by))

    @staticmethod
    def _no_instance(name: str, names: Iterable[str]) -> EngineError:
        return EngineError(f"there is no instance {quote(name)}; there are {', '.join(names) or 'none'}")

    async def remove(self, name: str, by: str = "") -> None:
        """End an instance for good, also while a rollout runs; others take over its chunks.

        Raises:
            EngineError: there is no such instance.
        """
        engine = self.engines.get(name)
        if engine is None:
            raise self._no_instance(name, self.engines)
        restart = self._restarts.get(name)
        if restart is not None:
            restart.cancel()
            await asyncio.gather(restart, return_exceptions=True)
        if self.alive.pop(name, None) is not None:
            self._leave(name, "it is removed", by)
        await self._left(name)
        self.engines.pop(name, None)
        for table in (self.failed, self.reports, self.degradations, self._lost_early):
            table.pop(name, None)
        self.weights.forget(name)
        self._budget.forget(name)
        self._astray.discard(name)
        try:
            await engine.stop()
        finally:
            log.info("instance_removed", instance=name)
            self._check_instances()

    def require_alive(self) -> None:
        """Raise EngineError unless an instance is alive or is being started again."""
        if self.alive or self._restarts:
            return
        if self.failed:
            name, reason = next(iter(self.failed.items()))
            raise EngineError(
                f"no instance is alive: each was given up, {name!r} for: {reason}; look into its log,"
                " then stop and start the runtime"
            )
        raise EngineError("no instance is alive; enter the runtime before rolling out")

    def _admit(self, info: InstanceInfo, event: str = "instance_started") -> None:
        self.alive[info.id] = info
        self._astray.discard(info.id)
        self._budget.started(info.id, self.clock.now())
        ends = {"end_token_ids": list(info.end_token_ids)} if info.end_token_ids else {}
        log.info(event, instance=info.id, kv_tokens=info.kv_capacity_tokens, **ends)

    async def _start_kv_pool(self) -> None:
        slot = self.kv_pool
        self._pool_started = False
        pool = None if slot is None else slot.strategy
        shared = [engine.id for engine in self.engines.values() if engine.set_kv_pool(pool)]
        if slot is not None and not shared:
            log.info("kv_pool_unused", pool=slot.owner, why="no engine shares its KV through it")
        if slot is not None and shared:
            with slot.named():
                await slot.strategy.start(shared)
            self._pool_started = True
            log.info("kv_pool_started", pool=slot.owner, capacity_bytes=slot.strategy.stats().capacity_bytes)

    async def _share_kv(self, engine: InstanceClient) -> None:
        """Let a newcomer share KV, if the pool has been started and makes room for it."""
        slot = self.kv_pool
        make_room = implemented(slot.strategy, "add") if slot is not None and self._pool_started else None
        if slot is None or make_room is None or not engine.set_kv_pool(slot.strategy):
            engine.set_kv_pool(None)
            return
        with slot.named():
            await make_room(engine.id)

    def _set_drafter(self, engines: Iterable[InstanceClient]) -> None:
        drafter = None if self.drafter is None else self.drafter.strategy
        for engine in engines:
            self.shares_sibling_tokens |= engine.set_drafter(drafter)

    async def _start(self, engine: InstanceClient) -> InstanceInfo:
        """Start an engine with the latest weights; an error names it."""
        self.degradations.pop(engine.id, None)
        try:
            info = await engine.start(self)
            self.reports.pop(engine.id, None)
            if (files := getattr(info, "model", "")) and self.model.digest not in ("", files):
                raise EngineError(
                    f"instance {engine.id!r} has other model files than the prompts are made for; give it the"
                    " model that the others have"
                )
            self._require_ends(engine.id, getattr(info, "end_token_ids", ()))
            await self.weights.load_current(engine, getattr(info, "fingerprint", ""))
        except SeerError:
            raise
        except Exception as error:
            raise EngineError(
                f"instance {engine.id!r} did not start: {type(error).__name__}: {error};"
                " report it to the author of its plug-in, or ask its doctor"
            ) from error
        if not isinstance(info, InstanceInfo) or info.id != engine.id:
            raise EngineError(
                f"instance {engine.id!r} answered its start with {info!r}, not with an InstanceInfo of that"
                " id; report it to the author of its plug-in"
            )
        return info

    def _require_ends(self, name: str, found: tuple[int, ...]) -> None:
        """Refuse an instance whose responses end with other tokens than those of the others."""
        if found and self.end_token_ids and found != self.end_token_ids:
            raise EngineError(
                f"instance {name!r} ends a response with the tokens {list(found)}, and others with"
                f" {list(self.end_token_ids)}; give all the same tokenizer and generation_config.json"
            )
        self.end_token_ids = found or self.end_token_ids

    # Losses.

    async def restarts_over(self, *, need_one: bool = True) -> None:
        """Let time pass until no instance is being started again.

        One that has no place yet is waited for only if ``need_one`` is true and no other is alive.
        """
        while self._restarts.keys() - (set() if need_one and not self.alive else self._without_place):
            self._restart_over.clear()
            if not await self.clock.advance(self._restart_over):
                await asyncio.sleep(0)

    async def _restart(self, engine: InstanceClient, reason: str, planned: bool) -> None:
        """Start a lost instance again, as often as it is allowed to; then give it up.

        One that left as ``planned``, has had no place so far, or is another program's, is stopped, and uses
        up no restart.  Nor does one whose owner has yet to load the weights of the others.

        An instance that was lost asleep waits: its memory belongs to another program until the others wake.
        """
        if planned:
            await self._left(engine.id)
            await engine.stop()
        await self._awake.wait()
        tries = 0
        while (pause_s := 0.0 if planned else self._budget.take(engine.id)) is not None:
            if pause_s:
                log.info("instance_restart_waits", instance=engine.id, seconds=pause_s)
                await self._pause(pause_s)
            try:
                await self._find_place(engine, reason)
                self._lost_early.pop(engine.id, None)
                info = await self._start(engine)
            except NoPlaceError:  # another has taken the place meanwhile
                continue
            except Exception as error:
                await engine.stop()
                reason = str(error).partition("\n")[0]
                planned = isinstance(error, OtherWeightsError) and self._has_others(engine.id)
                if planned:
                    await self._await_weights(engine.id, reason, tries)
                    tries += 1
                else:
                    log.error("instance_restart_failed", instance=engine.id, error=str(error))
                continue
            self._admit(info, "instance_restarted")
            self._controller.apply_guarded(InstanceStarted(info))
            self._lose_early(info.id)
            return
        log.error(
            "instance_failed",
            instance=engine.id,
            reason=reason,
            attempts=self._policy.attempts,
            window_s=self._policy.window_s,
        )
        self.failed[engine.id] = reason
        self._controller.apply_guarded(InstanceFailed(engine.id, reason))

    async def _find_place(self, engine: InstanceClient, reason: str) -> None:
        """Wait for a place, and for the others to wake if they fell asleep meanwhile.

        Until the engine says what is missing, that is the ``reason`` for which it is away.
        """
        if isinstance(engine, PlaceSeeker):
            self._missing[engine.id] = reason
            self._without_place.add(engine.id)
            self._restart_over.set()
            try:
                await engine.find_place(partial(self._waiting, engine.id))
            finally:
                self._without_place.discard(engine.id)
                self._missing.pop(engine.id, None)
            await self._awake.wait()

    def _has_others(self, name: str) -> bool:
        """Note that a server has other weights than the others; return whether there are any such others."""
        self._astray.add(name)
        return bool(self.engines.keys() - self.failed.keys() - self._astray)

    async def _await_weights(self, name: str, reason: str, tries: int) -> None:
        """Wait until the owner of a server may have loaded the weights of the others into it."""
        seconds = min(LONGEST_PAUSE_S, self._policy.backoff_s * 2.0 ** min(tries, MOST_DOUBLINGS))
        log.warning("instance_awaits_weights", instance=name, reason=reason, seconds=seconds)
        self._waiting(name, reason)
        look = asyncio.Event()
        self._looks.add(look)
        self._without_place.add(name)
        self._restart_over.set()
        try:
            await self._pause(seconds, look)
        finally:
            self._looks.discard(look)
            self._without_place.discard(name)
            self._missing.pop(name, None)

    def _waiting(self, name: str, missing: str) -> None:
        self._missing[name] = missing
        self._controller.apply_guarded(InstanceWaiting(name, missing))

    async def _pause(self, seconds: float, over: asyncio.Event | None = None) -> None:
        over = over or asyncio.Event()
        cancel = self.clock.call_at(self.clock.now() + seconds, over.set)
        try:
            await over.wait()
        finally:
            cancel()

    def _restarted(self, name: str, task: asyncio.Task[None]) -> None:
        if self._restarts.get(name) is task:  # it may have been lost again just after its start
            del self._restarts[name]
        self._restart_over.set()
        if not task.cancelled():
            if (error := task.exception()) is not None:
                log.error("instance_restart_failed", error=repr(error))
            self._check_instances()

    async def _end(self, name: str, reason: str) -> None:
        await self.engines[name].stop()
        self.lost(name, reason)

    def _check_instances(self) -> None:
        if not self.alive and not self._restarts:
            self._controller.no_instances_left()

    # Weights and caches.

    async def update_weights(self, source: WeightSpec, version: int | None = None) -> int:
        """Load new weights into every instance and return their version; see ``Driver.update_weights``."""
        number = self.weights.next(version)
        with self.weights.change():
            engines = {name: self.engines[name] for name in self.alive}
            if source.path == OWNER and not engines:  # each looks at them when it is back
                engines = {name: self.engines[name] for name in self._restarts}
            refused = await self.weights.update(source, number, engines)
            # The pool's keys carry the version, so old blocks are never read; clearing it frees their room.
            await self._clear_kv_pool()
            for name in [name for name in self.alive if not self.weights.served_by(name)]:
                await self._end(name, f"could not load weights: {refused[name]}")
        self._astray.clear()
        for look in self._looks:
            look.set()
        return number

    async def sleep(self) -> int:
        """Let all instances, none of which is being started, give memory back; see ``Driver.sleep``."""
        if self._adding > sum(not join.done() for join in self._joins):
            raise EngineError("an instance is being added; wait for that before the others sleep")
        async with self._sleep_lock:
            self._awake.clear()
            for join in self._joins:
                join.cancel()
            await asyncio.gather(*self._joins, return_exceptions=True)
            names = list(self.alive)
            answers = await asyncio.gather(
                *(self.engines[name].sleep() for name in names), return_exceptions=True
            )
            freed: dict[str, int] = {}
            refused: dict[str, str] = {}
            for name, answer in zip(names, answers, strict=True):
                if not isinstance(answer, BaseException):
                    freed[name] = answer
                elif name in self.alive:  # the others died, and start again when all wake
                    refused[name] = str(answer)
            if refused:
                await self._rouse()
                raise EngineError(f"the instances stay awake: {next(iter(refused.values()))}")
            log.info("instances_asleep", freed_bytes=freed)
            return sum(freed.values())

    async def wake(self) -> None:
        """Let all instances take their memory again; see ``Driver.wake``."""
        async with self._sleep_lock:
            if self.asleep:
                await self._rouse()
                log.info("instances_awake", instances=list(self.alive))

    async def _rouse(self) -> None:
        names = list(self.alive)
        answers = await asyncio.gather(*(self.engines[name].wake() for name in names), return_exceptions=True)
        for name, answer in zip(names, answers, strict=True):
            if isinstance(answer, BaseException) and name in self.alive:
                await self._end(name, f"it did not wake: {answer}")
        self._awake.set()

    async def reset_caches(self) -> None:
        """Let every instance, and the KV pool, forget all KV, and the drafter all earlier responses."""
        await self.restarts_over()
        if (memory := self.memory) is not None:
            with memory.named():
                memory.strategy.clear()
        await asyncio.gather(*(self.engines[name].reset_cache() for name in self.alive))
        await self._clear_kv_pool()

    async def _clear_kv_pool(self) -> None:
        if self.kv_pool is not None:
            with self.kv_pool.named():
                await self.kv_pool.strategy.clear()

    def forget_group(self, group_id: str, instances: Iterable[str]) -> None:
        """Let these instances drop a finished group from their drafting and KV pool."""
        if self.drafter is not None or self.kv_pool is not None:
            for name in instances:
                if name in self.alive:
                    self.engines[name].forget_group(group_id)

    def abort(self, instance_id: str, job_id: str) -> None:
        """Drop a chunk, if its instance is alive."""
        if instance_id in self.alive:
            self.engines[instance_id].abort(job_id)

    # The rest of the sink: engines call these on the event loop's thread.

    def reported(self, report: InstanceReported) -> None:
        """Keep an instance's latest telemetry and pass it on."""
        if report.instance_id in self.alive:
            self.reports[report.instance_id] = report
            self._controller.apply_guarded(report)

    def degraded(self, degradation: InstanceDegraded) -> None:
        """Log and pass on that a part of an instance has failed."""
        log.warning(
            "instance_degraded",
            instance=degradation.instance_id,
            what=degradation.what,
            reason=degradation.reason,
            log=degradation.log,
        )
        self.degradations.setdefault(degradation.instance_id, []).append(degradation)
        self._controller.apply_guarded(degradation)

    def lost(self, instance_id: str, reason: str) -> None:
        """Give a dead instance's chunks to others, and start it again in the background."""
        if instance_id not in self.alive:
            self._lost_early[instance_id] = reason
            return
        log.error("instance_lost", instance=instance_id, reason=reason)
        del self.alive[instance_id]
        self._budget.lost(instance_id, self.clock.now())
        self._controller.apply_guarded(InstanceLost(instance_id, reason))
        engine = self.engines[instance_id]
        self._begin_restart(engine, reason, planned=isinstance(engine, ForeignInstance))

    def _lose_early(self, instance_id: str) -> None:
        """Lose an instance that was lost before it was admitted."""
        if (reason := self._lost_early.pop(instance_id, None)) is not None:
            self.lost(instance_id, reason)

    def leaving(self, instance_id: str, reason: str) -> None:
        """Give the chunks of an instance that has to leave its place to others, and start it elsewhere."""
        if instance_id not in self.alive:
            return
        log.warning("instance_leaves", instance=instance_id, reason=reason)
        del self.alive[instance_id]
        self._budget.lost(instance_id, self.clock.now())
        self._leave(instance_id, reason)
        self._begin_restart(self.engines[instance_id], reason, planned=True)

    def _leave(self, name: str, reason: str, by: str = "") -> None:
        """Give an instance no more chunks, and end those that it has."""
        self._leaving.add(name)
        self._controller.apply_guarded(InstanceLeaving(name, reason, by))

    async def _left(self, name: str) -> None:
        """Wait, within a limit, until the chunks of an instance that leaves have ended; others are void."""
        if name in self._leaving:
            await self._controller.chunks_ended(END_CHUNKS_S, name)
        if name in self._leaving:
            self._leaving.remove(name)
            self._controller.apply_guarded(InstanceStopped(name))

    def _begin_restart(self, engine: InstanceClient, reason: str, *, planned: bool = False) -> None:
        task = asyncio.ensure_future(self._restart(engine, reason, planned))
        self._restarts[engine.id] = task
        task.add_done_callback(lambda task: self._restarted(engine.id, task))
