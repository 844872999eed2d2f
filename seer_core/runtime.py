"""The runtime: carries the scheduler's commands to engines, and what engines say back to it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import attrs
import structlog

from seer_core.config import Config, load_config
from seer_core.errors import EngineError, PluginError, PromptError, SeerError, WeightVersionError
from seer_core.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    RequestAborted,
)
from seer_core.model import ChunkRecord, Completion, InstanceInfo, PromptGroup, request_seed
from seer_core.plugins import Assembly, assemble
from seer_core.policy import Observer
from seer_core.ports import ChunkJob, ChunkOutput, Engine
from seer_core.result import RolloutResult, summarize
from seer_core.scheduler import Policies, Scheduler, Slot

__all__ = ["Rollout", "Runtime"]

log = structlog.get_logger("seer")


@attrs.define(eq=False)
class Transcript:
    """What the user will get of one request, as far as it is written."""

    group: PromptGroup
    index: int
    seed: int
    token_ids: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    chunks: list[ChunkRecord] = attrs.Factory(list)


@attrs.frozen
class Flight:
    """A chunk under way: the command that sent it, and when."""

    dispatch: Dispatch
    dispatched_s: float


class Runtime:
    """Engines, a scheduler and a clock; rolls out one batch of groups at a time.

    Use as an async context manager: entering starts all engines in parallel, leaving stops them.
    """

    def __init__(self, assembly: Assembly, *, max_restarts: int = 3, max_chunk_failures: int = 3) -> None:
        self.pool = assembly.pool
        self.clock = assembly.pool.clock
        self.observers: list[Slot[Observer]] = list(assembly.observers)
        self.max_restarts = max_restarts
        self.max_chunk_failures = max_chunk_failures
        self.weight_version = 0
        self.living: dict[str, InstanceInfo] = {}
        self._weight_source: str | None = None
        self._scheduler = Scheduler(assembly.policies, max_chunk_failures)
        self._engines: dict[str, Engine] = {engine.id: engine for engine in self.pool.engines}
        self._restarts: dict[str, int] = {}
        self._restarting: set[asyncio.Task[None]] = set()
        self._rollout: Rollout | None = None
        self._spoilt = False
        self.changed = asyncio.Event()

    @classmethod
    def from_config(cls, config: Config | str | Path) -> Runtime:
        """Assemble a runtime from a configuration or its file; nothing is started yet.

        Raises:
            ConfigError, PluginError: see ``load_config`` and ``assemble``.
        """
        if not isinstance(config, Config):
            config = load_config(config)
        return cls(
            assemble(config),
            max_restarts=config.seer.max_restarts,
            max_chunk_failures=config.seer.max_chunk_failures,
        )

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
        """Start all engines in parallel; if one fails, stop the others and raise its error.

        Raises:
            EngineError: an engine did not start.
            ConfigError: a plug-in finds that an instance does not suit its settings.
        """
        if not self._engines:
            raise EngineError("the engine plug-in made no engines; set its `instances` to 1 or more")
        starts = await asyncio.gather(
            *(engine.start(self) for engine in self._engines.values()), return_exceptions=True
        )
        try:
            for answer in starts:
                if isinstance(answer, BaseException):
                    raise answer
                self.living[answer.id] = answer
                log.info("instance_started", instance=answer.id, kv_tokens=answer.kv_capacity_tokens)
                self._handle(InstanceStarted(answer))
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """End all engines; idempotent."""
        for task in self._restarting:
            task.cancel()
        await asyncio.gather(*self._restarting, return_exceptions=True)
        if self._rollout is not None:
            self._rollout.fail(EngineError("the engines were stopped before the rollout had finished"))
            self._rollout = None
        answers = await asyncio.gather(
            *(engine.stop() for engine in self._engines.values()), return_exceptions=True
        )
        self.living.clear()
        for answer in answers:
            if isinstance(answer, BaseException):
                log.error("instance_stop_failed", error=str(answer))

    def use(self, policies: Policies, observers: Sequence[Slot[Observer]] = ()) -> None:
        """Schedule the next rollout by other policies, on the same engines."""
        self._expect_idle("change the policies")
        self.observers = list(observers)
        self._scheduler = Scheduler(policies, self.max_chunk_failures)
        self._spoilt = False
        for info in self.living.values():
            self._handle(InstanceStarted(info))

    async def reset_caches(self) -> None:
        """Let every engine forget its cached KV, so that the next rollout starts cold."""
        self._expect_idle("reset caches")
        await asyncio.gather(*self._restarting, return_exceptions=True)
        await asyncio.gather(*(self._engines[name].reset_cache() for name in self.living))

    async def update_weights(self, source: str) -> int:
        """Load new weights into every engine and return their version; nothing may be in flight.

        An instance that cannot load what others could is lost, and comes back with the new weights.

        Raises:
            WeightVersionError: a rollout is under way, so it would mix two versions.
            EngineError: no instance could load them; the old ones stay.
        """
        self._expect_idle("update weights", WeightVersionError)
        await asyncio.gather(*self._restarting, return_exceptions=True)
        version = self.weight_version + 1
        names = list(self.living)
        answers = await asyncio.gather(
            *(self._engines[name].update_weights(source, version) for name in names),
            return_exceptions=True,
        )
        failed = {name: answer for name, answer in zip(names, answers, strict=True) if answer}
        if len(failed) == len(names):
            fact = next(iter(failed.values()), "none is alive")
            raise EngineError(f"no instance could load the weights in {source!r}: {fact}")
        self._weight_source, self.weight_version = source, version
        for name, answer in failed.items():
            await self._engines[name].stop()
            self.lost(name, f"could not load weights: {answer}")
        log.info("weights_updated", version=version)
        return version

    def rollout(self, groups: Iterable[PromptGroup]) -> Rollout:
        """Begin to roll out prompt groups; iterate over what is returned for completions.

        Raises:
            PromptError: a group does not fit the model or the instances, or an id occurs twice.
            EngineError: no instance is alive.
        """
        self._expect_idle("start another rollout")
        if self._spoilt:
            raise SeerError("the last rollout failed midway; give the runtime fresh policies with use()")
        groups = list(groups)
        self._check(groups)
        rollout = Rollout(self, groups)
        if groups:
            self._rollout = rollout
            rollout.submit()
        return rollout

    # The sink: engines call these on the event loop's thread.

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Take a finished chunk."""
        if self._rollout is not None:
            self._guard(self._rollout.chunk_finished, instance_id, output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Take back a chunk."""
        log.warning("chunk_failed", instance=instance_id, chunk=job_id, reason=reason)
        if self._rollout is not None:
            self._guard(self._rollout.chunk_failed, instance_id, job_id, reason)

    def reported(self, report: InstanceReported) -> None:
        """Take telemetry."""
        if report.instance_id in self.living:
            self._guard(self._handle, report)

    def lost(self, instance_id: str, reason: str) -> None:
        """Give a dead instance's chunks back, and start it again in the background."""
        if instance_id not in self.living:
            return
        log.error("instance_lost", instance=instance_id, reason=reason)
        del self.living[instance_id]
        if self._rollout is not None:
            self._rollout.instance_lost(instance_id)
        self._guard(self._handle, InstanceLost(instance_id, reason))
        task = asyncio.ensure_future(self._restart(self._engines[instance_id]))
        self._restarting.add(task)
        task.add_done_callback(self._restarted)

    async def _restart(self, engine: Engine) -> None:
        """Start a lost instance again, as often as it is allowed to."""
        while self._restarts.get(engine.id, 0) < self.max_restarts:
            self._restarts[engine.id] = self._restarts.get(engine.id, 0) + 1
            try:
                info = await engine.start(self)
                if self._weight_source is not None:
                    await engine.update_weights(self._weight_source, self.weight_version)
            except SeerError as error:
                log.error("instance_restart_failed", instance=engine.id, error=str(error))
                continue
            self.living[info.id] = info
            log.info("instance_restarted", instance=info.id)
            self._guard(self._handle, InstanceStarted(info))
            return

    def _restarted(self, task: asyncio.Task[None]) -> None:
        self._restarting.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("instance_restart_failed", error=repr(error))
        if self._rollout is not None and not self.living and not self._restarting:
            self._rollout.fail(
                EngineError(
                    "no instance is left, and none could be started again; what had finished is kept."
                    " Look into the instances' logs, then run again"
                )
            )

    def _handle(self, event: Event) -> None:
        """Give an event to the scheduler, show it to the observers, carry out the commands."""
        now = self.clock.now()
        commands = self._scheduler.handle(event, now)
        for slot in self.observers:
            try:
                slot.strategy.observe(now, event, commands)
            except SeerError:
                raise
            except Exception as error:
                raise PluginError(
                    f"plug-in {slot.owner!r}, slot 'observer': raised {type(error).__name__}: {error};"
                    f" run without it: -p no:{slot.owner}"
                ) from error
        self.changed.set()
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

    def _guard(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run what an engine's word sets off; an error ends the rollout, not the event loop."""
        try:
            call(*arguments)
        except Exception as error:
            if self._rollout is None:
                log.error("event_failed", error=str(error))
            else:
                self._rollout.fail(error)

    def _finished(self, rollout: Rollout) -> None:
        if self._rollout is rollout:
            self._rollout = None

    def _abandon(self, flights: dict[str, Flight]) -> None:
        """Abort what a failed rollout left on the engines; its strategies are not used again."""
        self._rollout = None
        self._spoilt = True
        self.changed.set()
        for job_id, flight in flights.items():
            if flight.dispatch.instance_id in self.living:
                self._engines[flight.dispatch.instance_id].abort(job_id)
        self._scheduler = Scheduler(Policies(), self.max_chunk_failures)
        for info in self.living.values():
            self._scheduler.handle(InstanceStarted(info), self.clock.now())

    def _expect_idle(self, what: str, error: type[SeerError] = SeerError) -> None:
        if self._rollout is not None:
            raise error(
                f"cannot {what} while a rollout is under way; take its last completion first,"
                " or leave it with `await rollout.abort()`"
            )

    def _check(self, groups: Sequence[PromptGroup]) -> None:
        if groups and not self.living:
            raise EngineError("no instance is alive; enter the runtime before rolling out")
        seen: set[str] = set()
        room = max((info.kv_capacity_tokens for info in self.living.values()), default=0)
        for group in groups:
            if group.id in seen:
                raise PromptError(f"group id {group.id!r} occurs twice; give each group its own")
            seen.add(group.id)
            if group.n < 1 or group.max_tokens < 1 or not group.prompt_token_ids:
                raise PromptError(
                    f"group {group.id!r}: n, max_tokens and the prompt's length must be at least 1"
                )
            if (
                not 0
                <= min(group.prompt_token_ids)
                <= max(group.prompt_token_ids)
                < self.pool.model.vocab_size
            ):
                raise PromptError(
                    f"group {group.id!r}: a prompt token id is outside 0 .. {self.pool.model.vocab_size - 1}"
                )
            total = len(group.prompt_token_ids) + group.max_tokens
            if total > self.pool.model.max_model_tokens:
                raise PromptError(
                    f"group {group.id!r}: prompt and max_tokens make {total} tokens, the model takes"
                    f" {self.pool.model.max_model_tokens}; lower max_tokens"
                )
            if total > room:
                raise PromptError(
                    f"group {group.id!r}: prompt and max_tokens make {total} tokens, the largest"
                    f" instance's KV holds {room}; lower max_tokens or give the engine more KV"
                )


class Rollout:
    """One batch of groups under way: an async iterator over its completions, as they finish."""

    def __init__(self, runtime: Runtime, groups: Sequence[PromptGroup]) -> None:
        self._runtime = runtime
        self._groups = groups
        self._transcripts: dict[str, Transcript] = {}
        self._flights: dict[str, Flight] = {}
        self._ready: deque[Completion] = deque()
        self._completions: list[Completion] = []
        self._error: BaseException | None = None
        self._instances_lost = 0
        self.started_s = runtime.clock.now()
        for group in groups:
            for index in range(group.n):
                self._transcripts[f"{group.id}/{index}"] = Transcript(
                    group, index, request_seed(group.seed, index)
                )

    def submit(self) -> None:
        """Hand all groups to the scheduler; called once, by the runtime."""
        specs = tuple(
            GroupSpec(group.id, len(group.prompt_token_ids), group.n, group.max_tokens, group.known_lengths)
            for group in self._groups
        )
        log.info("rollout_started", groups=len(specs), requests=len(self._transcripts))
        try:
            self._runtime._handle(GroupsSubmitted(specs))
        except BaseException as error:
            self.fail(error)
            raise

    def __aiter__(self) -> Rollout:
        return self

    async def __anext__(self) -> Completion:
        while not self._ready:
            if self._error is not None:
                raise self._error
            if not self._transcripts:
                raise StopAsyncIteration
            self._runtime.changed.clear()
            if not await self._runtime.clock.advance(self._runtime.changed):
                raise EngineError(
                    f"{len(self._transcripts)} requests are unfinished and no engine will ever answer"
                )
        return self._ready.popleft()

    async def wait(self) -> RolloutResult:
        """Return the whole result once everything has finished."""
        async for _ in self:
            pass
        return self.result

    @property
    def result(self) -> RolloutResult:
        """What has finished so far, with its summary."""
        return RolloutResult(
            self._completions,
            summarize(self._completions, self.started_s, self._instances_lost, self._runtime.weight_version),
        )

    def abort_request(self, request_id: str) -> None:
        """Give up one request; it completes at once, with reason ``aborted`` and what it has."""
        if request_id in self._transcripts:
            self._runtime._guard(self._runtime._handle, RequestAborted(request_id))

    async def abort(self) -> RolloutResult:
        """Give up everything unfinished and return the result."""
        for request_id in list(self._transcripts):
            self.abort_request(request_id)
        return await self.wait()

    # What the runtime tells.

    def job(self, command: Dispatch, now: float) -> ChunkJob:
        """Write out a chunk for its engine and note that it is under way."""
        transcript = self._transcripts[command.request_id]
        group = transcript.group
        job_id = f"{command.request_id}#{len(transcript.chunks)}@{command.instance_id}"
        self._flights[job_id] = Flight(command, now)
        return ChunkJob(
            id=job_id,
            request_id=command.request_id,
            group_id=group.id,
            token_ids=[*group.prompt_token_ids, *transcript.token_ids],
            prompt_tokens=len(group.prompt_token_ids),
            max_tokens=command.max_tokens,
            sampling=group.sampling,
            seed=transcript.seed,
            weight_version=self._runtime.weight_version,
            known_tokens=group.known_lengths[transcript.index] if group.known_lengths else None,
        )

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Append a chunk's tokens and let the scheduler go on; a chunk no longer wanted is ignored."""
        flight = self._flights.pop(output.job_id, None)
        if flight is None:
            return
        if output.weight_version != self._runtime.weight_version:
            raise WeightVersionError(
                f"chunk {output.job_id!r} was computed with weight version {output.weight_version}, the"
                f" rollout runs on {self._runtime.weight_version}"
            )
        transcript = self._transcripts[flight.dispatch.request_id]
        tokens = len(output.token_ids)
        continued = bool(transcript.chunks)
        transcript.token_ids += output.token_ids
        transcript.logprobs += output.logprobs
        transcript.chunks.append(
            ChunkRecord(
                instance=instance_id,
                tokens=tokens,
                dispatched_s=flight.dispatched_s,
                finished_s=self._runtime.clock.now(),
                cached_tokens=output.cached_tokens,
                prefilled_tokens=output.prefilled_tokens,
                recomputed_tokens=_recomputed(output, continued),
                preemptions=output.preemptions,
                weight_version=output.weight_version,
            )
        )
        self._runtime._handle(ChunkFinished(flight.dispatch.request_id, instance_id, tokens, output.stopped))

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Let the scheduler decide about a chunk that was given back."""
        flight = self._flights.pop(job_id, None)
        if flight is not None:
            self._runtime._handle(ChunkFailed(flight.dispatch.request_id, instance_id, reason))

    def instance_lost(self, instance_id: str) -> None:
        """Forget what was under way on an instance."""
        self._instances_lost += 1
        self._flights = {
            job_id: flight
            for job_id, flight in self._flights.items()
            if flight.dispatch.instance_id != instance_id
        }

    def forget(self, request_id: str) -> str:
        """Drop the chunk of a request that is under way and return its id."""
        for job_id, flight in self._flights.items():
            if flight.dispatch.request_id == request_id:
                del self._flights[job_id]
                return job_id
        raise KeyError(request_id)

    def complete(self, command: Complete, now: float) -> None:
        """Turn a transcript into a completion."""
        transcript = self._transcripts.pop(command.request_id)
        tokenizer = self._runtime.pool.tokenizer
        completion = Completion(
            request_id=command.request_id,
            group_id=transcript.group.id,
            index=transcript.index,
            seed=transcript.seed,
            token_ids=transcript.token_ids,
            logprobs=transcript.logprobs,
            text=tokenizer.decode(transcript.token_ids) if tokenizer is not None else None,
            finish_reason=command.finish_reason,
            weight_version=self._runtime.weight_version,
            chunks=transcript.chunks,
            instances=list(dict.fromkeys(chunk.instance for chunk in transcript.chunks)),
            finished_s=now,
            metadata=transcript.group.metadata,
        )
        self._completions.append(completion)
        self._ready.append(completion)
        if not self._transcripts:
            log.info("rollout_finished", requests=len(self._completions))
            self._runtime._finished(self)

    def fail(self, error: BaseException) -> None:
        """End the rollout with an error; what has finished stays."""
        if self._error is None:
            self._error = error
            self._runtime._abandon(self._flights)


def _recomputed(output: ChunkOutput, continued: bool) -> int:
    """Positions that this chunk ran through the model although an earlier step had done so.

    Fresh work is the first chunk's prefill, and one position per new token but the last; a continued
    request also owes the position of its last token, which was sampled but never run.
    """
    fresh = len(output.token_ids) + (0 if continued else output.prefilled_tokens - 1)
    return max(0, output.computed_tokens - fresh)
