"""The loop: events go from the fleet to the scheduler, its commands to the fleet."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from secrets import token_hex
from typing import Any

import structlog

from seer_core.audience import Audience
from seer_core.config import SeerTable
from seer_core.errors import EngineError, SeerError
from seer_core.events import (
    Abort,
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    Event,
    GroupsSubmitted,
    InstanceLost,
    InstanceStarted,
    InstanceStopped,
    RequestsAborted,
)
from seer_core.fleet import Fleet
from seer_core.model import PromptGroup
from seer_core.plugins import Assembly, Strategies
from seer_core.policy import Explaining
from seer_core.ports import ChunkOutput, ChunkPiece
from seer_core.prompts import check_groups
from seer_core.result import Tally
from seer_core.rollout import Rollout
from seer_core.scheduler import Policies, Scheduler
from seer_core.transcripts import Transcripts

__all__ = ["Loop"]

log = structlog.get_logger("seer")


class Loop:
    """Joins a fleet, a scheduler, observers and at most one rollout; it waits for nothing itself.

    ``spoilt``: a rollout failed midway, so its strategies do not know where they stand.  ``iteration`` counts
    the rollouts, as far as they had groups, that take no more.
    """

    def __init__(self, assembly: Assembly, settings: SeerTable) -> None:
        strategies = assembly.strategies
        self._settings = settings
        self.fleet = Fleet(assembly.fleet, settings, self, strategies.drafter, assembly.kv_pool)
        self.use(strategies)
        self.rollout: Rollout | None = None
        self.iteration = 0
        self._dropped = 0

    def use(self, strategies: Strategies) -> None:
        """Decide by other strategies from now on; nothing of them is started."""
        self.audience = Audience(strategies.observers, debug=self._settings.debug, kv_pool=self.fleet.kv_pool)
        self.scheduler = self._make_scheduler(strategies.policies)
        self.spoilt = False

    def say_chunks(self) -> None:
        """Log what the splitter has to say for the length of its chunks."""
        for slot in self.scheduler.policies.splitter.links:
            if isinstance(slot.strategy, Explaining):
                log.info("chunk_tokens", plugin=slot.owner, why=slot.strategy.explain())

    def meet_living(self) -> None:
        """Let other strategies know of the instances that live."""
        for info in self.fleet.living.values():
            if info.id not in self.scheduler.instances:
                self.handle(InstanceStarted(info))
        self.say_chunks()

    def begin(self, keep: bool, most_requests: int | None) -> Rollout:
        """Begin a rollout, which is open and has no group yet; raises as ``Runtime.open``."""
        self.expect_idle("start another rollout")
        self.expect_fresh()
        fleet = self.fleet
        decode = None if fleet.tokenizer is None else fleet.tokenizer.decode
        # The id is random: what is kept beside the engines may be shared by several runs.
        transcripts = Transcripts(
            fleet.weights.current.version,
            token_hex(6),
            decode,
            sharing=fleet.shares_text,
            dropped=self._dropped,
        )
        tally = Tally(fleet.clock.now(), fleet.reports, fleet.troubles, len(fleet.given_up))
        self.rollout = Rollout(transcripts, tally, fleet.clock, self.audience, self, keep, most_requests)
        return self.rollout

    # What the user of the rollout asks for.

    def submit(self, groups: Sequence[PromptGroup]) -> None:
        """Roll out these groups as well; raises as ``Rollout.add``."""
        rollout, fleet = self.rollout, self.fleet
        assert rollout is not None
        fleet.expect_living()
        transcripts = rollout.transcripts
        check_groups(groups, fleet.model, fleet.living.values(), transcripts.groups)
        specs = tuple(transcripts.add(group) for group in groups)
        log.info("groups_submitted", groups=len(specs), requests=sum(spec.n for spec in specs))
        try:
            self.handle(GroupsSubmitted(specs))
        except BaseException as error:
            self.fail(error)
            raise

    def give_up(self, request_ids: Sequence[str]) -> None:
        """Abort requests."""
        self.hear(RequestsAborted(tuple(request_ids)))

    def closed(self) -> None:
        """Take note that no more groups will come."""
        assert self.rollout is not None
        self.iteration += bool(self.rollout.submitted)
        self._end_if_over(self.rollout)

    def expect_fresh(self) -> None:
        """Raise SeerError if the strategies have seen a rollout that failed midway."""
        if self.spoilt:
            raise SeerError(
                "the last rollout failed midway; give the runtime fresh strategies with use(), a session by"
                " renew()"
            )

    def expect_idle(self, what: str, error: type[SeerError] = SeerError) -> None:
        """Raise ``error`` if there is something under way beside which one cannot do ``what``."""
        if self.fleet.asleep:
            raise SeerError(f"cannot {what} while the instances are asleep; wake them first")
        if self.fleet.weights.changing:
            raise error(f"cannot {what} while weights are being updated; await that first")
        if self.rollout is not None:
            raise error(
                f"cannot {what} while a rollout is under way; close it if it is open and take its last"
                " completion first, or leave it with `await rollout.abort()`"
            )

    # What the fleet tells.

    def handle(self, event: Event) -> None:
        """Give an event to the scheduler, show it to the observers, carry out the commands."""
        now, rollout = self.fleet.clock.now(), self.rollout
        if rollout is not None:
            rollout.tally.see(event)
            if isinstance(event, InstanceLost | InstanceStopped):
                rollout.transcripts.lost(event.instance_id)
        commands = self.scheduler.handle(event, now)
        self.audience.show(now, event, tuple(commands))
        for command in commands:
            assert rollout is not None
            match command:
                case Dispatch():
                    self.fleet.engines[command.instance_id].submit(rollout.transcripts.job(command, now))
                    self._teach(rollout, command.request_id)
                case Complete():
                    self._complete(rollout, command, now)
                case Abort():
                    job_id = rollout.transcripts.forget(command.request_id)
                    self.fleet.engines[command.instance_id].abort(job_id)

    def hear(self, event: Event) -> None:
        """Take an event that an instance caused; an error ends the rollout, not the event loop."""
        self._guard(self.handle, event)

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Take a finished chunk; one that is no longer wanted is ignored."""
        self._guard(self._chunk_finished, instance_id, output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Take back a chunk."""
        log.warning("chunk_failed", instance=instance_id, chunk=job_id, reason=reason)
        if self.rollout is not None:
            event = self.rollout.transcripts.failed(instance_id, job_id, reason)
            if event is not None:
                self.hear(event)

    def chunk_grew(self, instance_id: str, piece: ChunkPiece) -> None:
        """Show what a running chunk has written; the scheduler knows nothing of it."""
        self._guard(self._chunk_grew, instance_id, piece)

    def stranded(self) -> None:
        """End the rollout: no instance is left."""
        self.fail(
            EngineError(
                "no instance is left, and none could be started again; what had finished is kept."
                " Look into the instances' logs, then run again"
            )
        )

    def _chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        if self.rollout is not None:
            event = self.rollout.transcripts.finished(instance_id, output, self.fleet.clock.now())
            if isinstance(event, ChunkFailed):
                log.warning("chunk_failed", instance=instance_id, chunk=output.job_id, reason=event.reason)
            if isinstance(event, ChunkFinished):
                self._teach(self.rollout, event.request_id)
            if event is not None:
                self.handle(event)

    def _chunk_grew(self, instance_id: str, piece: ChunkPiece) -> None:
        if self.rollout is not None:
            written = self.rollout.transcripts.grew(piece)
            if written is not None:
                self.audience.grew(self.fleet.clock.now(), written)

    def _teach(self, rollout: Rollout, request_id: str) -> None:
        """Let instances that work on a request's group know what its siblings have written elsewhere."""
        for instance_id, text in rollout.transcripts.untold(request_id):
            self.fleet.engines[instance_id].teach(text)

    def _complete(self, rollout: Rollout, command: Complete, now: float) -> None:
        closed = rollout.transcripts.complete(command, now)
        rollout.take(closed)
        self.audience.completed(now, closed.completion)
        self.fleet.forget_group(closed.completion.group_id, closed.forgetful)
        self._end_if_over(rollout)

    def _end_if_over(self, rollout: Rollout) -> None:
        """Let go of a rollout that is closed, and has no unfinished requests."""
        if not rollout.over:
            return
        if rollout.submitted:
            log.info("rollout_finished", requests=rollout.tally.requests)
            if (error := rollout.tally.failure) is not None:
                rollout.fail(error)
        self._dropped = rollout.transcripts.dropped
        self.rollout = None

    def _guard(self, call: Callable[..., None], *arguments: Any) -> None:
        try:
            call(*arguments)
        except Exception as error:
            if self.rollout is None:
                log.error("event_failed", error=str(error))
            self.fail(error)

    def fail(self, error: BaseException) -> None:
        """End the rollout, abort what it left on the engines; its strategies are not used again."""
        rollout, self.rollout = self.rollout, None
        if rollout is None:
            return
        self.spoilt = True
        self.iteration += rollout.open and bool(rollout.submitted)
        rollout.fail(error)
        under_way = rollout.transcripts.under_way
        for instance_id, job_id in under_way:
            self.fleet.abort(instance_id, job_id)
        self._dropped = rollout.transcripts.dropped + len(under_way)
        self.scheduler = self._make_scheduler(Policies())
        for info in self.fleet.living.values():
            self.scheduler.handle(InstanceStarted(info), self.fleet.clock.now())

    def _make_scheduler(self, policies: Policies) -> Scheduler:
        return Scheduler(policies, self._settings.max_chunk_failures, debug=self._settings.debug)
