"""The controller: engines' events go to the scheduler, and its commands to the engines."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from secrets import token_hex
from typing import Any, cast

import msgspec
import structlog

from seer_core.error_origin import describe_error, is_interruption, one_line
from seer_core.errors import EngineError, PromptError, SeerError, quote
from seer_core.model import PromptGroup, WrittenResponse
from seer_core.model.arrays import Tokens
from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFinished,
    Complete,
    Dispatch,
    EndChunk,
    EnvironmentFailed,
    Event,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
    InstanceStopped,
    RolloutResumed,
)
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.contracts import implemented
from seer_core.ports.engine import ChunkEnder, ChunkOutput, ChunkPiece
from seer_core.ports.extension import Extender, HeldResponse, MakeExtender
from seer_core.ports.weights import WeightStore
from seer_core.runtime.fleet import Fleet, FleetCalls
from seer_core.runtime.observers import ObserverHub
from seer_core.runtime.restarts import RestartsTable
from seer_core.runtime.rollout import ControllerCalls, CoreRollout, MakeRollout
from seer_core.runtime.transcripts import ClosedRequest, ReadText, Transcripts
from seer_core.scheduling.scheduler import Scheduler

__all__ = ["RolloutController"]

log = structlog.get_logger("seer")

LOOK_S = 0.02
"""How often a wait for chunks that are to end early looks at them."""


class RolloutController:
    """Joins a fleet, a scheduler, observers and at most one rollout; it waits for nothing itself.

    ``strategies_failed``: a rollout failed midway, so the strategies' state is undefined, and the scheduler
    gets no more events until ``use``.  ``iteration`` counts the closed rollouts that had groups.
    """

    def __init__(
        self,
        assembly: Assembly,
        restarts: RestartsTable,
        max_chunk_failures: int,
        weights: WeightStore,
        read_text: ReadText | None,
        *,
        debug: bool,
    ) -> None:
        strategies = assembly.strategies
        self._max_chunk_failures = max_chunk_failures
        self._debug = debug
        self._read_text = read_text
        calls = FleetCalls(
            self.chunk_finished,
            self.chunk_failed,
            self.chunk_streamed,
            self.apply,
            self.apply_guarded,
            self.chunks_ended,
            self.no_instances_left,
        )
        self.fleet = Fleet(assembly.fleet, restarts, calls, weights, strategies.drafter, assembly.kv_pool)
        self.use(strategies)
        self.rollout: CoreRollout | None = None
        self.iteration = 0
        self._transcripts = Transcripts()
        self._chunk_numbers = count()
        self._extender: Extender | None = None
        self._homes: dict[str, str] = {}
        """The instance that has the KV of each trajectory."""

    def use(self, strategies: Strategies) -> None:
        """Replace the strategies and the observers, and start none of them."""
        self.observers = ObserverHub(
            strategies.observers, debug=self._debug, kv_pool=self.fleet.kv_pool, others=strategies.others
        )
        self.scheduler = Scheduler(strategies.policies, self._max_chunk_failures)
        self.strategies = strategies
        self.strategies_failed = False

    async def stop(self) -> None:
        """Stop what extends responses, and the observers; idempotent."""
        if self._extender is not None:
            self._extender.stop()
            await self._extender.closed()
        await self.observers.stop()

    def log_chunk_lengths(self) -> None:
        """Log the splitters' reasons for the length of their chunks."""
        for slot in self.scheduler.policies.splitter.links:
            explain = implemented(slot.strategy, "explain")
            if explain is None:
                continue
            with slot.named():
                why = explain()
            if why:
                log.info("chunk_tokens", plugin=slot.owner, why=why)

    def introduce_instances(self) -> None:
        """Give the running instances to a scheduler that was made after their start."""
        for info in self.fleet.alive.values():
            if info.id not in self.scheduler.instances:
                self.apply(InstanceStarted(info))
        self.log_chunk_lengths()

    def begin(
        self,
        make_rollout: MakeRollout,
        most_requests: int | None,
        make_extender: MakeExtender | None,
    ) -> CoreRollout:
        """Begin a rollout, which is open and has no group yet; raises as ``Driver.open``."""
        self.require_idle("start another rollout")
        self.expect_healthy()
        fleet = self.fleet
        if self.scheduler.paused:  # the last rollout ended so
            self.apply_guarded(RolloutResumed())
        self._transcripts = Transcripts(
            fleet.weights.current.version,
            token_hex(6),  # random: several runs may share what is kept beside the engines
            self._read_text,
            sharing=fleet.shares_sibling_tokens,
            chunk_numbers=self._chunk_numbers,
        )
        self._extender = None if make_extender is None else make_extender(self)
        calls = ControllerCalls(self.submit, self.apply_guarded, self.chunks_ended, self.closed)
        self.rollout = make_rollout(self._transcripts, fleet.clock, self.observers, calls, most_requests)
        return self.rollout

    def expect_healthy(self) -> None:
        """Raise SeerError if a rollout that failed midway has left the strategies in an undefined state."""
        if self.strategies_failed:
            raise SeerError(
                "the last rollout failed midway; give the runtime fresh strategies with use(), a session by"
                " reset_strategies()"
            )

    def require_idle(self, what: str, error: type[SeerError] = SeerError) -> None:
        """Raise ``error`` if something is under way beside which ``what`` is impossible."""
        if self.fleet.asleep:
            raise SeerError(f"cannot {what} while the instances are asleep; wake them first")
        if self.fleet.weights.changing:
            raise error(f"cannot {what} while weights are being updated; await that first")
        if self.rollout is not None:
            raise error(
                f"cannot {what} while a rollout is under way; close it if it is open and take its last"
                " completion first, or leave it with `await rollout.abort()`"
            )

    # Calls from the rollout.

    def submit(self, groups: Sequence[PromptGroup]) -> None:
        """Roll out these groups as well; raises as ``CoreRollout.add``."""
        fleet, transcripts = self.fleet, self._transcripts
        fleet.require_alive()
        self._require_new_ids(groups)
        if self._extender is not None:
            groups = [msgspec.structs.replace(group, turns=True) for group in groups]
        assert self.rollout is not None
        written = self.rollout.begin(groups)
        earlier = self._earlier(groups, written)
        specs = tuple(
            transcripts.add(group, done, before, self._home(group), whole=self.rollout.is_whole(group))
            for group, done, before in zip(groups, written, earlier, strict=True)
        )
        log.info("groups_submitted", groups=len(specs), requests=sum(spec.n for spec in specs))
        try:
            self.apply(GroupsSubmitted(specs))
        except BaseException as error:
            self.fail(error)
            raise

    def _home(self, group: PromptGroup) -> str:
        """Return the instance that has the KV of the one trajectory of a group; empty if there is none."""
        return self._homes.get(group.trajectories[0], "") if len(set(group.trajectories)) == 1 else ""

    def _require_new_ids(self, groups: Sequence[PromptGroup]) -> None:
        """Raise PromptError where an id occurs twice among groups, or is that of one under way."""
        seen: set[str] = set()
        for group in groups:
            if group.id in seen or group.id in self._transcripts.groups:
                where = "occurs twice" if group.id in seen else "is that of a group under way"
                raise PromptError(f"group {quote(group.id)}: this id {where}; give each group its own")
            seen.add(group.id)

    def _earlier(
        self, groups: Sequence[PromptGroup], written: Sequence[Sequence[WrittenResponse]]
    ) -> Sequence[Sequence[Tokens]]:
        """Return the responses of earlier rollouts to each group's prompt that are drafted from.

        Those that the group resumes are left out: they are siblings' tokens already.
        """
        if (memory := self.fleet.memory) is None:
            return [()] * len(groups)
        found = []
        for group, responses in zip(groups, written, strict=True):
            resumed = [each.token_ids for each in responses if each.finish_reason is not None]
            with memory.named():
                recalled = memory.strategy.recall(group.prompt_token_ids)
            found.append([each for each in recalled if each not in resumed])
        return found

    def forget(self, name: str) -> None:
        """Drop what is kept of a trajectory or a family."""
        self._transcripts.forget(name)
        self._homes.pop(name, None)
        self.fleet.forget_group(name, self.fleet.alive)

    def forget_kv(self) -> None:
        """Look for the KV of no trajectory where its last turn ran: the instances have forgotten it."""
        self._homes.clear()

    def closed(self, rollout: CoreRollout) -> None:
        """Count a rollout that takes no more groups."""
        self.iteration += bool(rollout.submitted)
        self._end_if_over(rollout)

    # Calls from the fleet and its engines.

    def apply(self, event: Event) -> None:
        """Give an event to the scheduler, show it to the observers, carry out the commands."""
        now = self.fleet.clock.now()
        if type(event) is not ChunkFinished:  # most are, and mean nothing here
            if self.rollout is not None:
                self.rollout.see(event)
            if isinstance(event, (InstanceLost, InstanceStopped)):
                lost = event.instance_id
                self._transcripts.lost(lost)
                self._homes = {name: home for name, home in self._homes.items() if home != lost}
        commands = [] if self.strategies_failed else self.scheduler.handle(event, now)
        self.observers.notify(now, event, tuple(commands))
        for command in commands:
            match command:
                case Dispatch():
                    transcripts = self._transcripts
                    self.fleet.engines[command.instance_id].submit(transcripts.job(command, now))
                    if transcripts.sharing:
                        self._share_text(command.request_id)
                case Complete():
                    self._complete(command, now)
                case AskEnvironment():
                    self._transcripts.hold(command.request_id, now)
                    assert self._extender is not None
                    self._extender.held(command.request_id)
                case Abort():
                    job_id = self._transcripts.drop(command.request_id)
                    self.fleet.engines[command.instance_id].abort(job_id)
                case EndChunk():
                    engine = self.fleet.engines[command.instance_id]
                    if isinstance(engine, ChunkEnder):
                        engine.end_chunk(self._transcripts.end(command.request_id))

    def apply_guarded(self, event: Event) -> None:
        """Apply an event that an instance caused; an error ends the rollout and is not raised."""
        with self._guard():
            self.apply(event)

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Take a finished chunk; an answer to a chunk that was dropped is ignored."""
        try:  # not a ``_guard``, which costs more than the transcript
            event = self._transcripts.finished(instance_id, output, self.fleet.clock.now())
            if isinstance(event, ChunkFinished):
                if self._transcripts.sharing:
                    self._share_text(event.request_id)
                keep = None if self.rollout is None else self.rollout.chunk_ended(event, output)
                self.apply(event)
                if keep is not None:
                    keep()
            elif event is not None:
                log.warning("chunk_failed", instance=instance_id, chunk=output.job_id, reason=event.reason)
                self.apply(event)
        except BaseException as error:
            if is_interruption(error):
                raise
            self._failed(error)

    # Calls from what extends responses.

    def held(self, request_id: str) -> HeldResponse:
        """Return a response that is held."""
        return self._transcripts.held(request_id)

    def extend(
        self,
        request_id: str,
        token_ids: Sequence[int],
        reward: float | None,
        done: bool,
        attachments: Mapping[str, Any] | None = None,
    ) -> None:
        """Append tokens that no engine wrote, and go on unless the response is done."""
        with self._guard():
            now, transcripts = self.fleet.clock.now(), self._transcripts
            event = transcripts.extend(request_id, token_ids, reward, done, now, attachments)
            if self.rollout is not None:
                self.rollout.extended(event)
            self.apply(event)

    def extension_failed(self, request_id: str, reason: str) -> None:
        """End a response that nothing extends."""
        with self._guard():
            self._transcripts.extension_failed(request_id, reason)
            self.apply(EnvironmentFailed(request_id, reason))

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Take back a chunk."""
        log.warning("chunk_failed", instance=instance_id, chunk=job_id, reason=reason)
        event = self._transcripts.failed(instance_id, job_id, reason)
        if event is not None:
            self.apply_guarded(event)

    def chunk_streamed(self, instance_id: str, piece: ChunkPiece) -> None:
        """Keep what a running chunk has written and notify the observers; the scheduler has no use for it."""
        with self._guard():
            request_id = self._transcripts.streamed(piece)
            if request_id is not None:
                self.observers.streamed(self.fleet.clock.now(), request_id)

    async def chunks_ended(self, limit_s: float, instance_id: str | None = None) -> None:
        """Wait, at most so long, until chunks that are to end early have, on one instance or on all."""
        clock = self.fleet.clock
        over_s = clock.now() + limit_s
        while self._transcripts.ending(instance_id) and clock.now() < over_s:
            look = asyncio.Event()
            clock.call_at(min(over_s, clock.now() + LOOK_S), look.set)
            await clock.advance(look)

    def no_instances_left(self) -> None:
        """End the rollout: all instances were given up."""
        last = next(reversed(self.fleet.failed.items()), None)
        why = "" if last is None else f", {last[0]!r} last for: {last[1]}"
        self.fail(
            EngineError(
                f"no instance is left, and none could be started again{why}; what had finished is kept."
                " Look into the instances' logs, then run again"
            )
        )

    def fail(self, error: BaseException) -> None:
        """End the rollout and abort its chunks; its strategies are not used again."""
        rollout, self.rollout = self.rollout, None
        if rollout is None:
            return
        self.strategies_failed = True
        self.iteration += rollout.open and bool(rollout.submitted)
        rollout.fail(error)
        for instance_id, job_id in self._transcripts.under_way:
            self.fleet.abort(instance_id, job_id)
        if self._extender is not None:
            self._extender.stop()
        self._transcripts = Transcripts()

    def _share_text(self, request_id: str) -> None:
        """Send instances that work on a request's group what its siblings have written elsewhere."""
        for instance_id, text in self._transcripts.pending(request_id):
            self.fleet.engines[instance_id].add_sibling_tokens(text)

    def _complete(self, command: Complete, now: float) -> None:
        rollout = self.rollout
        assert rollout is not None
        closed = self._transcripts.complete(command, now)
        if self._extender is not None:
            self._extender.over(command.request_id)
        if closed.trajectory and closed.completion.chunks:
            self._homes[closed.trajectory] = closed.completion.chunks[-1].instance
        rollout.take(closed)
        self.observers.completed(now, closed.completion)
        self.fleet.forget_group(closed.completion.group_id, closed.instances)
        self._remember(closed)
        self._end_if_over(rollout)

    def _remember(self, closed: ClosedRequest) -> None:
        """Give a response to the drafter's memory, unless that had it before the run was resumed."""
        memory, response = self.fleet.memory, closed.completion.token_ids
        # A simulated engine's tokens are none that could be drafted.
        if memory is None or not isinstance(response, Tokens) or not response:
            return
        with memory.named():
            is_resumed = closed.resumed_tokens == len(response)
            if not (is_resumed and response in memory.strategy.recall(closed.prompt)):
                memory.strategy.remember(closed.prompt, response)

    def _end_if_over(self, rollout: CoreRollout) -> None:
        """Let go of a rollout that is closed and has no unfinished requests."""
        if not rollout.over:
            return
        self.rollout = None
        if rollout.submitted:
            log.info("rollout_finished", requests=rollout.finished)
            rollout.fail_if_all_failed()

    @contextmanager
    def _guard(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            if is_interruption(error):
                raise
            self._failed(error)

    def _failed(self, error: BaseException) -> None:
        """End the rollout by an error that an event has caused; log one that no rollout is there to raise."""
        if self.rollout is None:
            log.error("event_failed", error=one_line(error))
        self.fail(_raisable(error))


def _raisable(error: BaseException) -> Exception:
    """Return an error as one that a waiting caller gets; Python would take some classes for another thing."""
    kind = type(error)
    if issubclass(kind, Exception) and not issubclass(kind, StopIteration | StopAsyncIteration):
        return cast("Exception", error)
    failure = SeerError(f"the rollout ended: its runtime raised {describe_error(error, __name__)}")
    failure.__cause__ = error
    return failure
