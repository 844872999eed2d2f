"""The runtime: carries the scheduler's commands to engines, and what engines say back to it."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import structlog

from seer_core.audience import Audience
from seer_core.blame import fault
from seer_core.config import Config, RolloutTable, SeerTable, load_config
from seer_core.errors import (
    EngineError,
    PluginError,
    PromptError,
    SeerError,
    WeightVersionError,
    quote,
)
from seer_core.events import (
    Abort,
    Complete,
    Dispatch,
    Event,
    InstanceGivenUp,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    InstanceTroubled,
)
from seer_core.kv import KVPool
from seer_core.model import InstanceInfo, PromptGroup
from seer_core.plugins import Assembly, Strategies, assemble
from seer_core.policy import Explaining, Observer
from seer_core.ports import ChunkOutput, Engine
from seer_core.prompts import make_groups, problem_of
from seer_core.restarts import RestartBudget
from seer_core.result import RolloutResult
from seer_core.rollout import Flight, Rollout
from seer_core.scheduler import Policies, Scheduler, Slot
from seer_core.weights import FIRST_WEIGHTS, NO_COPY, WeightStore

__all__ = ["Runtime", "rollout"]

log = structlog.get_logger("seer")


@contextmanager
def _blaming(slot: Slot[Any]) -> Iterator[None]:
    """Turn what a plug-in raises by mistake into a ``PluginError`` that names it and the way around it."""
    try:
        yield
    except SeerError:
        raise
    except Exception as error:
        without = "--set seer.kv_pool=none" if slot.name == "kv_pool" else f"-p no:{slot.owner}"
        raise PluginError(
            f"plug-in {slot.owner!r}, slot {slot.name!r}: raised {fault(error, slot.strategy)};"
            f" run without it: {without}"
        ) from error


class Keep(Enum):
    """What ``Runtime.use`` leaves as it is."""

    POOL = "pool"


class Runtime:
    """Engines, a scheduler and a clock; rolls out one batch of groups at a time.

    Use as an async context manager: entering starts all engines in parallel, leaving stops them.
    """

    def __init__(
        self,
        assembly: Assembly,
        settings: SeerTable = SeerTable(),  # noqa: B008, immutable
        defaults: RolloutTable = RolloutTable(),  # noqa: B008, immutable
    ) -> None:
        self.pool = assembly.pool
        self.clock = assembly.pool.clock
        self.observers = list(assembly.strategies.observers)
        self.audience = Audience(self.observers, debug=settings.debug)
        self.drafter = assembly.strategies.drafter
        self.kv_pool = assembly.kv_pool
        self.settings = settings
        self.defaults = defaults
        self.iteration = 0
        """Rollouts begun so far: what enters the next one's default seeds."""
        self.living: dict[str, InstanceInfo] = {}
        self.reports: dict[str, InstanceReported] = {}
        self.troubles: dict[str, list[InstanceTroubled]] = {}
        self._weights = FIRST_WEIGHTS
        self._weight_store = WeightStore(settings.weights_dir)
        self._loaded: dict[str, int] = {}
        self._fingerprints: dict[int, str] = {}
        self._weights_settled = asyncio.Event()
        self._weights_settled.set()
        self._scheduler = self._make_scheduler(assembly.strategies.policies)
        self._engines: dict[str, Engine] = {engine.id: engine for engine in self.pool.engines}
        self.given_up: dict[str, str] = {}
        """Why instances that are not started again were lost for good, by id."""
        self._restarts = self._new_budget()
        self._started = False
        self._lost_early: dict[str, str] = {}
        self._restarting: set[asyncio.Task[None]] = set()
        self._rollout: Rollout | None = None
        self._spoilt = False
        self.changed = asyncio.Event()

    @classmethod
    def from_config(cls, config: Config | str | Path, observers: Iterable[Observer] = ()) -> Runtime:
        """Assemble a runtime from a configuration or its file, with observers beside those of its plug-ins.

        Nothing is started yet.

        Raises:
            ConfigError, PluginError: see ``load_config`` and ``assemble``.
        """
        if not isinstance(config, Config):
            config = load_config(config)
        settings = config.seer
        if settings.weights_dir not in ("", NO_COPY):
            place = str(config.base_dir / settings.weights_dir)
            settings = msgspec.structs.replace(settings, weights_dir=place)
        return cls(assemble(config).watched_by(*observers), settings, config.rollout)

    @property
    def weight_version(self) -> int:
        """How often weights have been updated: the version that completions are of."""
        return self._weights.version

    def _make_scheduler(self, policies: Policies) -> Scheduler:
        return Scheduler(policies, self.settings.max_chunk_failures, debug=self.settings.debug)

    async def __aenter__(self) -> Runtime:
        await self.start()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start observers, KV pool, drafter, then all engines in parallel; if one fails, stop all and raise.

        May be called again after ``stop``.

        Raises:
            SeerError: it has been started already, or a rollout that failed midway has spoilt its strategies.
            EngineError: an engine did not start, or cannot draft or share KV.
            PluginError: an observer, the KV pool or the drafter did not start.
            ConfigError: a plug-in finds that an instance does not suit its settings.
        """
        if not self._engines:
            raise EngineError("the engine plug-in made no engines; set its `instances` to 1 or more")
        if self._started:
            raise SeerError("the runtime has been started already; stop it before it can start again")
        self._expect_fresh()
        self._started = True
        self._lost_early.clear()
        self.given_up.clear()
        self._restarts = self._new_budget()
        try:
            await self.audience.start()
            await self._start_kv_pool()
            await self._start_drafter()
            starts = await asyncio.gather(
                *(self._start(engine) for engine in self._engines.values()), return_exceptions=True
            )
            for answer in starts:
                if isinstance(answer, BaseException):
                    raise answer
                self._alive(answer)
                log.info("instance_started", instance=answer.id, kv_tokens=answer.kv_capacity_tokens)
                self.handle(InstanceStarted(answer))
        except BaseException:
            await self.stop()
            raise
        self._say_chunks()
        for name, reason in self._lost_early.items():
            self.lost(name, reason)

    def _alive(self, info: InstanceInfo) -> None:
        self.living[info.id] = info
        self._restarts.started(info.id, self.clock.now())

    def _new_budget(self) -> RestartBudget:
        settings = self.settings
        return RestartBudget(settings.max_restarts, settings.restart_window_s, settings.restart_backoff_s)

    def _say_chunks(self) -> None:
        """Log what the splitter has to say for the length of its chunks."""
        for slot in self._scheduler.policies.splitter.links:
            if isinstance(slot.strategy, Explaining):
                log.info("chunk_tokens", plugin=slot.owner, why=slot.strategy.explain())

    async def _start_kv_pool(self) -> None:
        """Tell the engines of the KV pool, and start it if one of them will use it."""
        slot = self.kv_pool
        shared = [
            engine.id
            for engine in self._engines.values()
            if engine.share_kv(None if slot is None else slot.strategy)
        ]
        if slot is not None and not shared:
            log.info("kv_pool_unused", pool=slot.owner, why="no engine shares its KV through it")
        if slot is not None and shared:
            with _blaming(slot):
                await slot.strategy.start(shared)
            log.info("kv_pool_started", pool=slot.owner, capacity_bytes=slot.strategy.stats().capacity_bytes)

    async def _start_drafter(self) -> None:
        """Start what the draft sources share, and tell the engines what to draft with."""
        slot = self.drafter
        if slot is not None:
            with _blaming(slot):
                await slot.strategy.start(len(self._engines))
        for engine in self._engines.values():
            engine.draft_with(slot.strategy if slot is not None else None)

    async def _start(self, engine: Engine) -> InstanceInfo:
        """Start an engine, with the latest weights, and name it where it breaks the contract of that."""
        self.troubles.pop(engine.id, None)
        try:
            info = await engine.start(self)
            self.reports.pop(engine.id, None)
            await self._load_weights(engine, getattr(info, "fingerprint", ""))
        except SeerError:
            raise
        except Exception as error:
            raise EngineError(
                f"instance {engine.id!r} did not start: {type(error).__name__}: {error};"
                " report it to the author of its plug-in, or see `seer doctor`"
            ) from error
        if not isinstance(info, InstanceInfo) or info.id != engine.id:
            raise EngineError(
                f"instance {engine.id!r} answered its start with {info!r}, not with an InstanceInfo of that"
                " id; report it to the author of its plug-in"
            )
        return info

    async def _load_weights(self, engine: Engine, fingerprint: str | None) -> None:
        """Bring an engine that has just started to the current weights, and see that they are the others'."""
        version = 0
        while True:
            await self._weights_settled.wait()
            weights = self._weights
            if weights.version == version:
                break
            version = weights.version
            if weights.digest:
                await asyncio.to_thread(weights.check)
            fingerprint = await engine.update_weights(weights.path, version)
        if fingerprint and (known := self._fingerprints.setdefault(version, fingerprint)) != fingerprint:
            raise EngineError(
                f"instance {engine.id!r} came up with other weights than version {version} of the others:"
                f" their fingerprint is {fingerprint}, not {known};"
                + (" has the model's directory changed?" if version == 0 else " report this")
            )
        self._loaded[engine.id] = version

    async def stop(self) -> None:
        """End all engines, drafter, KV pool and observers, delete the copy of the weights; idempotent."""
        await self._end()
        self._weights = await asyncio.to_thread(self._weight_store.close, self._weights)

    async def _end(self) -> None:
        """End what ``start`` started."""
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        if self._rollout is not None:
            self._rollout.fail(EngineError("the engines were stopped before the rollout had finished"))
            self._rollout = None
        names = list(self.living)
        self.living.clear()  # before they stop, so that none lost meanwhile is started again
        for name in names:
            self.guard(self.handle, InstanceStopped(name))
        answers = await asyncio.gather(
            *(engine.stop() for engine in self._engines.values()), return_exceptions=True
        )
        for answer in answers:
            if isinstance(answer, BaseException):
                log.error("instance_stop_failed", error=str(answer))
        for slot in (self.drafter, self.kv_pool):
            if slot is not None:
                try:
                    await slot.strategy.stop()
                except Exception as error:
                    log.error(
                        "stop_failed", slot=slot.name, plugin=slot.owner, error=fault(error, slot.strategy)
                    )
        await self.audience.stop()
        self._started = False

    async def use(self, strategies: Strategies, kv_pool: Slot[KVPool] | Keep | None = Keep.POOL) -> None:
        """Roll out by other strategies, and through another KV pool or none, from now on.

        Where drafting or the pool changes, engines are started anew.

        Raises:
            EngineError, PluginError: as ``start``; the runtime is stopped then.
        """
        self._expect_idle("change the strategies")
        pool = self.kv_pool if isinstance(kv_pool, Keep) else kv_pool
        anew = bool(self.living) and (strategies.drafter is not self.drafter or pool is not self.kv_pool)
        if anew:
            await self._end()
        await self.audience.stop()
        self.observers = list(strategies.observers)
        self.audience = Audience(self.observers, debug=self.settings.debug)
        self.drafter, self.kv_pool = strategies.drafter, pool
        self._scheduler = self._make_scheduler(strategies.policies)
        self._spoilt = False
        if anew:
            await self.start()
        else:
            if self._started:
                try:
                    await self.audience.start()
                except BaseException:
                    await self._end()
                    raise
            for info in self.living.values():
                self.handle(InstanceStarted(info))
            self._say_chunks()

    async def reset_caches(self) -> None:
        """Let every engine, and the pool, forget all KV, so that the next rollout starts cold."""
        self._expect_idle("reset caches")
        await self._restarts_over()
        await asyncio.gather(*(self._engines[name].reset_cache() for name in self.living))
        await self._clear_kv_pool()

    async def _clear_kv_pool(self) -> None:
        if self.kv_pool is not None:
            with _blaming(self.kv_pool):
                await self.kv_pool.strategy.clear()

    async def update_weights(self, source: str) -> int:
        """Load new weights into every engine and return their version; nothing may be in flight.

        Engines load a copy of the directory ``source``, which is kept until the next update: the directory
        may change or vanish once this has returned.  An instance that cannot load what others could, or that
        then has another fingerprint than most, is lost, and comes back with the new weights.

        Raises:
            WeightVersionError: a rollout or another update is under way, so versions would mix.
            EngineError: the weights could not be kept, or no instance could load them; the old ones stay.
        """
        self._expect_idle("update weights", WeightVersionError)
        await self._restarts_over()
        self._expect_idle("update weights", WeightVersionError)  # still
        self._weights_settled.clear()
        try:
            version = await self._update_weights(source)
        finally:
            self._weights_settled.set()
        log.info("weights_updated", version=version, digest=self._weights.digest)
        return version

    async def _update_weights(self, source: str) -> int:
        if not self.living:
            raise EngineError(f"no instance could load the weights in {source!r}: none is alive")
        old, version = self._weights, self.weight_version + 1
        new = await asyncio.to_thread(self._weight_store.keep, source, version)
        names = list(self.living)
        answers = await asyncio.gather(
            *(self._engines[name].update_weights(new.path, version) for name in names),
            return_exceptions=True,
        )
        failed: dict[str, object] = {
            name: answer
            for name, answer in zip(names, answers, strict=True)
            if isinstance(answer, BaseException)
        }
        if len(failed) == len(names):
            await asyncio.to_thread(self._weight_store.drop, version)
            fact = next(iter(failed.values()), "none is alive")
            raise EngineError(f"no instance could load the weights in {source!r}: {fact}")
        fingerprints = {
            name: answer for name, answer in zip(names, answers, strict=True) if isinstance(answer, str)
        }
        if fingerprints:
            [(usual, _)] = Counter(fingerprints.values()).most_common(1)
            self._fingerprints = {version: usual}
            for name, fingerprint in fingerprints.items():
                if fingerprint != usual:
                    failed[name] = f"their fingerprint is {fingerprint} there, not {usual} as elsewhere"
        self._weights = new
        self._loaded |= {name: version for name in names if name not in failed}
        await asyncio.to_thread(self._weight_store.drop, old.version)
        await self._clear_kv_pool()  # its keys carry the version: this only frees what nobody will ask for
        for name in [name for name in self.living if self._loaded.get(name, 0) != version]:
            await self._engines[name].stop()
            self.lost(name, f"could not load weights: {failed[name]}")
        return version

    def groups(self, records: Iterable[Mapping[str, Any]], iteration: int | None = None) -> list[PromptGroup]:
        """Build prompt groups from mappings with the fields of a prompts file's lines.

        ``iteration`` enters the default seeds, so that the same prompts get other responses in the next one.
        It is the number of rollouts that this runtime has begun, unless given: by one that goes on where
        another stopped, or wants a repetition.  Groups keep their seeds, so the same groups repeat
        themselves.

        Raises:
            PromptError: a record cannot be rolled out.
        """
        return make_groups(
            records,
            self.defaults,
            self.pool.model,
            self.pool.tokenizer,
            seed=self.settings.seed,
            iteration=self.iteration if iteration is None else iteration,
        )

    def rollout(self, groups: Iterable[PromptGroup]) -> Rollout:
        """Begin to roll out prompt groups; iterate over what is returned for completions.

        Raises:
            PromptError: a group does not fit the model or the instances, or an id occurs twice.
            EngineError: no instance is alive.
        """
        self._expect_idle("start another rollout")
        self._expect_fresh()
        groups = list(groups)
        self._check(groups)
        rollout = Rollout(self, groups)
        if groups:
            self._rollout = rollout
            self.iteration += 1
            rollout.submit()
        return rollout

    # The sink: engines call these on the event loop's thread.

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Take a finished chunk."""
        if self._rollout is not None:
            self.guard(self._rollout.chunk_finished, instance_id, output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Take back a chunk."""
        log.warning("chunk_failed", instance=instance_id, chunk=job_id, reason=reason)
        if self._rollout is not None:
            self.guard(self._rollout.chunk_failed, instance_id, job_id, reason)

    def reported(self, report: InstanceReported) -> None:
        """Take telemetry."""
        if report.instance_id in self.living:
            self.reports[report.instance_id] = report
            self.guard(self.handle, report)

    def troubled(self, trouble: InstanceTroubled) -> None:
        """Let the user know what an instance works without."""
        log.warning(
            "instance_troubled",
            instance=trouble.instance_id,
            what=trouble.what,
            reason=trouble.reason,
            log=trouble.log,
        )
        self.troubles.setdefault(trouble.instance_id, []).append(trouble)
        if self._rollout is not None:
            self._rollout.instance_troubled(trouble)
        self.guard(self.handle, trouble)

    def lost(self, instance_id: str, reason: str) -> None:
        """Give a dead instance's chunks back, and start it again in the background."""
        if instance_id not in self.living:
            self._lost_early[instance_id] = reason
            return
        log.error("instance_lost", instance=instance_id, reason=reason)
        del self.living[instance_id]
        self._restarts.lost(instance_id, self.clock.now())
        if self._rollout is not None:
            self._rollout.instance_lost(instance_id)
        self.guard(self.handle, InstanceLost(instance_id, reason))
        task = asyncio.ensure_future(self._restart(self._engines[instance_id], reason))
        self._restarting.add(task)
        task.add_done_callback(self._restarted)

    async def _restart(self, engine: Engine, reason: str) -> None:
        """Start a lost instance again, as often as it is allowed to; then give it up."""
        while (pause_s := self._restarts.take(engine.id)) is not None:
            if pause_s:
                log.info("instance_restart_waits", instance=engine.id, seconds=pause_s)
                await self._pause(pause_s)
            try:
                info = await self._start(engine)
            except Exception as error:
                log.error("instance_restart_failed", instance=engine.id, error=str(error))
                reason = str(error).partition("\n")[0]
                await engine.stop()
                continue
            self._alive(info)
            log.info("instance_restarted", instance=info.id)
            self.guard(self.handle, InstanceStarted(info))
            return
        self._give_up(engine.id, reason)

    def _give_up(self, name: str, reason: str) -> None:
        """Let the user know that an instance is not started again."""
        settings = self.settings
        log.error(
            "instance_given_up",
            instance=name,
            reason=reason,
            max_restarts=settings.max_restarts,
            restart_window_s=settings.restart_window_s,
        )
        self.given_up[name] = reason
        if self._rollout is not None:
            self._rollout.instance_given_up()
        self.guard(self.handle, InstanceGivenUp(name, reason))

    async def _pause(self, seconds: float) -> None:
        """Wait for so long on the run's clock, which somebody else moves on."""
        over = asyncio.Event()
        cancel = self.clock.call_at(self.clock.now() + seconds, over.set)
        try:
            await over.wait()
        finally:
            cancel()

    async def _restarts_over(self) -> None:
        """Wait until no instance is being started again, and let time pass meanwhile."""
        while self._restarting:
            self.changed.clear()
            if not await self.clock.advance(self.changed):
                await asyncio.sleep(0)

    def _restarted(self, task: asyncio.Task[None]) -> None:
        self._restarting.discard(task)
        self.changed.set()
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("instance_restart_failed", error=repr(error))
        if self._rollout is not None and not self.living and not self._restarting:
            self._rollout.fail(
                EngineError(
                    "no instance is left, and none could be started again; what had finished is kept."
                    " Look into the instances' logs, then run again"
                )
            )

    def handle(self, event: Event) -> None:
        """Give an event to the scheduler, show it to the observers, carry out the commands."""
        now = self.clock.now()
        commands = self._scheduler.handle(event, now)
        self.audience.show(now, event, tuple(commands))
        for command in commands:
            assert self._rollout is not None
            match command:
                case Dispatch():
                    self._engines[command.instance_id].submit(self._rollout.job(command, now))
                case Complete():
                    self._rollout.complete(command, now)
                case Abort():
                    job_id = self._rollout.forget(command.request_id)
                    self._engines[command.instance_id].abort(job_id)

    def forget_group(self, group_id: str, instances: Iterable[str]) -> None:
        """Let these instances drop what drafting and the KV pool remember of a group that is over."""
        if self.drafter is not None or self.kv_pool is not None:
            for name in instances:
                if name in self.living:
                    self._engines[name].forget_group(group_id)

    def guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run what an engine's word sets off; an error ends the rollout, not the event loop."""
        try:
            call(*arguments)
        except Exception as error:
            if self._rollout is None:
                log.error("event_failed", error=str(error))
            else:
                self._rollout.fail(error)

    def rollout_finished(self, rollout: Rollout) -> None:
        """Be ready for the next rollout."""
        if self._rollout is rollout:
            self._rollout = None

    def rollout_failed(self, flights: dict[str, Flight]) -> None:
        """Abort what a failed rollout left on the engines; its strategies are not used again."""
        self._rollout = None
        self._spoilt = True
        self.changed.set()
        for job_id, flight in flights.items():
            if flight.dispatch.instance_id in self.living:
                self._engines[flight.dispatch.instance_id].abort(job_id)
        self._scheduler = self._make_scheduler(Policies())
        for info in self.living.values():
            self._scheduler.handle(InstanceStarted(info), self.clock.now())

    def _expect_fresh(self) -> None:
        if self._spoilt:
            raise SeerError("the last rollout failed midway; give the runtime fresh strategies with use()")

    def _expect_idle(self, what: str, error: type[SeerError] = SeerError) -> None:
        if not self._weights_settled.is_set():
            raise error(f"cannot {what} while weights are being updated; await that first")
        if self._rollout is not None:
            raise error(
                f"cannot {what} while a rollout is under way; take its last completion first,"
                " or leave it with `await rollout.abort()`"
            )

    def _check(self, groups: Sequence[PromptGroup]) -> None:
        if groups and not self.living and not self._restarting:
            if self.given_up:
                name, reason = next(iter(self.given_up.items()))
                raise EngineError(
                    f"no instance is alive: each was given up, {name!r} for: {reason}; look into its log,"
                    " then stop and start the runtime"
                )
            raise EngineError("no instance is alive; enter the runtime before rolling out")
        seen: set[str] = set()
        room = max((info.kv_capacity_tokens for info in self.living.values()), default=None)
        for group in groups:
            problem = problem_of(group, self.pool.model)
            needed = len(group.prompt_token_ids) + group.max_tokens
            if problem is None and group.id in seen:
                problem = "this id occurs twice; give each group its own"
            if problem is None and room is not None and needed > room:
                problem = (
                    f"prompt and max_tokens make {needed} tokens, the largest instance's KV holds {room};"
                    " lower max_tokens or give the engine more KV"
                )
            if problem is not None:
                raise PromptError(f"group {quote(group.id)}: {problem}")
            seen.add(group.id)


def rollout(
    config: Config | str | Path,
    records: Iterable[Mapping[str, Any]],
    iteration: int = 0,
    observers: Iterable[Observer] = (),
) -> RolloutResult:
    """Start engines, roll out prompts, stop engines, return the result: the short form for scripts.

    ``records`` have the fields of a prompts file's lines.  A script that trains gives the number of its
    ``iteration``: the same prompts get the same responses where it is the same.  Call it where no event loop
    runs; with one, use ``Runtime``.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        pass
    else:
        raise SeerError(
            "seer_core.rollout() runs an event loop of its own, and one is running here already; use"
            " `async with Runtime.from_config(config) as runtime` instead"
        )

    async def run() -> RolloutResult:
        async with Runtime.from_config(config, observers) as runtime:
            return await runtime.rollout(runtime.groups(records, iteration)).wait()

    return asyncio.run(run())
