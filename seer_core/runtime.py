"""The runtime: what a user starts, rolls out with, gives new weights to, and stops."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import EllipsisType
from typing import Any

import msgspec

from seer_core.config import Config, RolloutTable, SeerTable, load_config
from seer_core.errors import EngineError, SeerError, WeightVersionError
from seer_core.kv import KVPool
from seer_core.loop import Loop
from seer_core.model import InstanceInfo, PromptGroup
from seer_core.plugins import Assembly, Strategies, assemble
from seer_core.policy import Observer
from seer_core.ports import Engine
from seer_core.prompts import make_groups
from seer_core.rollout import Rollout
from seer_core.scheduler import Slot
from seer_core.snapshots import NO_COPY
from seer_core.weights import WeightSpec, directory

__all__ = ["Runtime"]


class Runtime:
    """A fleet of engines, a scheduler and a clock; one rollout at a time, of a batch or open.

    Use as an async context manager: entering starts all engines in parallel, leaving stops them.
    """

    def __init__(
        self,
        assembly: Assembly,
        settings: SeerTable = SeerTable(),  # noqa: B008, immutable
        defaults: RolloutTable = RolloutTable(),  # noqa: B008, immutable
    ) -> None:
        self.settings = settings
        self.defaults = defaults
        self.loop = Loop(assembly, settings)
        self.fleet = self.loop.fleet
        self._started = False

    @classmethod
    def from_config(cls, config: Config | str | Path, observers: Iterable[Observer] = ()) -> Runtime:
        """Assemble a runtime from a configuration or its file, with more observers; nothing is started yet.

        Raises:
            ConfigError, PluginError: see ``load_config`` and ``assemble``.
        """
        config = config if isinstance(config, Config) else load_config(config)
        settings = config.seer
        if settings.weights_dir not in ("", NO_COPY):
            place = str(config.base_dir / settings.weights_dir)
            settings = msgspec.structs.replace(settings, weights_dir=place)
        return cls(assemble(config).watched_by(*observers), settings, config.rollout)

    @property
    def living(self) -> Mapping[str, InstanceInfo]:
        """The instances that take chunks, by id."""
        return self.fleet.living

    @property
    def kv_pool(self) -> Slot[KVPool] | None:
        """The KV pool that instances share, if any."""
        return self.fleet.kv_pool

    @property
    def iteration(self) -> int:
        """Rollouts closed so far: what enters the default seeds of the one that is open, or the next."""
        return self.loop.iteration

    @property
    def weight_version(self) -> int:
        """The version that completions are of: 0 until weights are updated."""
        return self.fleet.weights.current.version

    async def __aenter__(self) -> Runtime:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        """Start observers, KV pool, then all engines in parallel; if one fails, stop all and raise.

        May be called again after ``stop``.

        Raises:
            SeerError: it has been started already, or a rollout that failed midway has spoilt its strategies.
            EngineError: an engine did not start, or cannot draft or share KV.
            PluginError: an observer or the KV pool did not start.
            ConfigError: a plug-in finds that an instance does not suit its settings.
        """
        if not self.fleet.engines:
            raise EngineError("the engine plug-in made no engines; set its `instances` to 1 or more")
        if self._started:
            raise SeerError("the runtime has been started already; stop it before it can start again")
        self.loop.expect_fresh()
        self._started = True
        try:
            await self.loop.audience.start()
            await self.fleet.start()
        except BaseException:
            await self.stop()
            raise
        self.loop.say_chunks()

    async def stop(self) -> None:
        """End all engines, KV pool and observers, delete the copy of the weights; idempotent."""
        await self._end()
        await self.fleet.weights.close()

    async def _end(self) -> None:
        """End what ``start`` started."""
        self.loop.fail(EngineError("the engines were stopped before the rollout had finished"))
        await self.fleet.stop()
        await self.loop.audience.stop()
        self._started = False

    async def use(self, strategies: Strategies, kv_pool: Slot[KVPool] | EllipsisType | None = ...) -> None:
        """Roll out by other strategies, and through another KV pool or none, if one is named, from now on.

        Where drafting or the pool changes, engines are started anew.

        Raises:
            EngineError, PluginError: as ``start``; the runtime is stopped then.
        """
        self.loop.expect_idle("change the strategies")
        fleet = self.fleet
        pool = fleet.kv_pool if kv_pool is ... else kv_pool
        anew = fleet.living and (strategies.drafter is not fleet.drafter or pool is not fleet.kv_pool)
        if anew:
            await self._end()
        await self.loop.audience.stop()
        fleet.drafter, fleet.kv_pool = strategies.drafter, pool
        self.loop.use(strategies)
        if anew:
            await self.start()
            return
        if self._started:
            try:
                await self.loop.audience.start()
            except BaseException:
                await self._end()
                raise
        self.loop.meet_living()

    async def add(self, engine: Engine) -> InstanceInfo:
        """Start one more instance, also while a rollout runs; see ``Fleet.add``."""
        if not self._started:
            raise SeerError("the runtime has not been started; enter it before adding an instance")
        return await self.fleet.add(engine)

    async def remove(self, instance_id: str) -> None:
        """End an instance for good, also while a rollout runs; see ``Fleet.remove``."""
        await self.fleet.remove(instance_id)

    async def reset_caches(self) -> None:
        """Let every engine, and the pool, forget all KV, so that the next rollout starts cold."""
        self.loop.expect_idle("reset caches")
        await self.fleet.reset_caches()

    async def update_weights(self, source: str | Path | WeightSpec, version: int | None = None) -> int:
        """Load new weights into every engine and return their version; nothing may be in flight.

        ``version`` is the trainer's, such as the number of its step; without one it is the next.
        ``source`` is a directory of safetensors, or names another ``WeightSource``.  Of a directory engines
        load a copy, which is kept until the next update; what another source reads is its author's to keep
        until then.  An instance that cannot load what others could, or that then has another fingerprint than
        most, is lost, and comes back with the new weights.

        Raises:
            SeerError: the instances are asleep.
            WeightVersionError: a rollout or another update is under way, or the version is no higher than
                the current one, so versions would mix.
            EngineError: the weights could not be kept, or no instance could load them; the old ones stay.
        """
        await self._settle("update weights", WeightVersionError)
        spec = source if isinstance(source, WeightSpec) else directory(source)
        return await self.fleet.update_weights(spec, version)

    async def sleep(self) -> int:
        """Let all instances give memory back until ``wake``, and return how many bytes that gave.

        It is for a trainer on the same devices.  Instances forget all KV; the KV pool keeps its own.  Which
        memory an engine gives back is said in its documentation, and 0 bytes means none.  Whatever needs the
        instances is an error until then.  One that is lost asleep starts again once the others wake.  If they
        sleep already, or are just waking, nothing is done.

        Raises:
            SeerError: a rollout or an update is under way.
            EngineError: an instance refuses; all are awake then.
        """
        if self.fleet.asleep:
            return 0
        await self._settle("put the instances to sleep")
        return await self.fleet.sleep()

    async def wake(self) -> None:
        """Let all instances take their memory again: ready for new weights, or for a rollout by the old ones.

        One that cannot is lost and starts again.  Does nothing if they are awake.
        """
        await self.fleet.wake()

    def groups(
        self, records: Iterable[Mapping[str, Any]], iteration: int | None = None, *, fitting: bool = False
    ) -> list[PromptGroup]:
        """Build prompt groups from mappings with the fields of a prompts file's lines.

        ``iteration`` enters the default seeds, so that the same prompts get other responses in the next one.
        It is this runtime's ``iteration``, unless given: by one that goes on where another stopped, or wants
        a repetition.  Groups keep their seeds, so the same groups repeat themselves.  But a prompt without an
        id gets another one, and so other responses, each time that it is built while one rollout is open.

        If they are to be ``fitting``, a response of which ``max_tokens`` is not said may have as many as
        ``[rollout]`` says, or as fit beside its prompt if these are fewer.

        Raises:
            PromptError: a record cannot be rolled out.
            ConfigError: the default ``max_tokens`` is beyond the model's length.
        """
        fleet, rollout = self.fleet, self.loop.rollout
        longest = fleet.model.max_model_tokens
        room = max((info.kv_capacity_tokens for info in self.living.values()), default=longest)
        return make_groups(
            records,
            self.defaults,
            fleet.model,
            fleet.tokenizer,
            seed=self.settings.seed,
            iteration=self.iteration if iteration is None else iteration,
            named=rollout.named if rollout is not None and rollout.open else None,
            most_tokens=min(longest, room) if fitting else None,
        )

    def rollout(self, groups: Iterable[PromptGroup], *, keep: bool = True) -> Rollout:
        """Begin to roll out a batch: ``open``, ``add`` and ``close`` in one; raises as they do."""
        rollout = self.open(keep=keep)
        try:
            rollout.add(groups)
        finally:
            rollout.close()
        return rollout

    def open(self, *, keep: bool = True, most_requests: int | None = None) -> Rollout:
        """Begin a rollout that takes groups until it is closed; iterate over it for completions.

        Unless it is to ``keep`` them for its result, a completion is yours alone once you have read it.  It
        takes at most ``most_requests`` unfinished ones at a time, if that is given.

        Raises:
            SeerError: something else is under way, the instances sleep, or a failure spoilt the strategies.
        """
        return self.loop.begin(keep, most_requests)

    async def _settle(self, what: str, error: type[SeerError] = SeerError) -> None:
        """Wait for instances that are being started again; nothing else may be under way, nor begin."""
        self.loop.expect_idle(what, error)
        await self.fleet.restarts_over()
        self.loop.expect_idle(what, error)
