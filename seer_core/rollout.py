"""One rollout: transcripts in the making, chunks under way, completions as they finish."""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from secrets import token_hex
from typing import TYPE_CHECKING

import attrs
import msgspec
import structlog

from seer_core.errors import EngineError, PluginError, TransitionError, WeightVersionError
from seer_core.events import (
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    GroupSpec,
    GroupsSubmitted,
    InstanceReported,
    InstanceTroubled,
    RequestAborted,
)
from seer_core.model import ChunkRecord, Completion, PromptGroup, request_seed
from seer_core.ports import ChunkJob, ChunkOutput
from seer_core.result import RolloutResult, summarize

if TYPE_CHECKING:
    from seer_core.runtime import Runtime

__all__ = ["Flight", "Rollout"]

log = structlog.get_logger("seer")


@attrs.define(eq=False)
class Siblings:
    """What the transcripts of a group share; ``left`` are not over, ``instances`` were given chunks of it."""

    group: PromptGroup
    prompt: list[int]
    left: int
    instances: dict[str, None] = attrs.Factory(dict)


@attrs.define(eq=False)
class Transcript:
    """What the user will get of one request, as far as it is written."""

    siblings: Siblings
    index: int
    seed: int
    token_ids: list[int] = attrs.Factory(list)
    logprobs: list[float] = attrs.Factory(list)
    chunks: list[ChunkRecord] = attrs.Factory(list)


class Flight(msgspec.Struct, frozen=True):
    """A chunk under way: the command that sent it, and when."""

    dispatch: Dispatch
    dispatched_s: float


class Rollout:
    """One batch of groups under way: an async iterator over its completions, as they finish.

    The iterator raises ``EngineError`` when no instance is left, and in the end if no request finished
    but with reason ``error``.  The engines are served between two completions: what takes longer than a
    moment, such as a reward that computes, belongs into a thread, ``await asyncio.to_thread(reward, it)``.
    """

    def __init__(self, runtime: Runtime, groups: Sequence[PromptGroup]) -> None:
        self._runtime = runtime
        self._groups = groups
        self._id = token_hex(6)  # random: runs that share a draft server know nothing of each other
        self._transcripts: dict[str, Transcript] = {}
        self._flights: dict[str, Flight] = {}
        self._ready: deque[Completion] = deque()
        self._completions: list[Completion] = []
        self._error: BaseException | None = None
        self._first_failure = ""
        self._instances_lost = 0
        self._instances_given_up = len(runtime.given_up)
        self._reports = dict(runtime.reports)
        self._troubles = [each for told in runtime.troubles.values() for each in told]
        self.started_s = runtime.clock.now()
        for group in groups:
            siblings = Siblings(group, list(group.prompt_token_ids), group.n)
            for index in range(group.n):
                self._transcripts[f"{group.id}/{index}"] = Transcript(
                    siblings, index, request_seed(group.seed, index)
                )

    def submit(self) -> None:
        """Hand all groups to the scheduler; called once, by the runtime."""
        specs = tuple(
            GroupSpec(
                group.id,
                len(group.prompt_token_ids),
                group.n,
                group.max_tokens,
                group.known_lengths,
                group.sampling,
                dict(group.labels),
            )
            for group in self._groups
        )
        log.info("rollout_started", groups=len(specs), requests=len(self._transcripts))
        try:
            self._runtime.handle(GroupsSubmitted(specs))
        except BaseException as error:
            self.fail(error)
            raise

    def __aiter__(self) -> Rollout:
        return self

    async def __anext__(self) -> Completion:
        if self._ready:
            await asyncio.sleep(0)  # or engines would not be heard while many are ready
        return await self._next()

    async def _next(self) -> Completion:
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

    def unread(self) -> list[Completion]:
        """Take the completions not iterated over yet, without waiting: for one who must leave."""
        unread = list(self._ready)
        self._ready.clear()
        return unread

    async def wait(self) -> RolloutResult:
        """Return the whole result once everything has finished."""
        with suppress(StopAsyncIteration):
            while True:
                await self._next()
        return self.result

    @property
    def result(self) -> RolloutResult:
        """What has finished so far, with its summary."""
        return RolloutResult(
            self._completions,
            summarize(
                self._completions,
                self.started_s,
                self._instances_lost,
                self._runtime.weight_version,
                self._drafting_share(),
                self._troubles,
                self._instances_given_up,
                self._runtime.audience.left_out,
            ),
        )

    def _drafting_share(self) -> float:
        """Return the part of the engines' stepping time since this rollout's start that went into drafts."""
        stepping = drafting = 0.0
        for name, report in self._runtime.reports.items():
            before = self._reports.get(name)
            if before is None or before.stepping_s > report.stepping_s:  # it was started anew since
                before = InstanceReported(name, 0, 0, 0.0)
            stepping += report.stepping_s - before.stepping_s
            drafting += report.drafting_s - before.drafting_s
        return drafting / stepping if stepping else 0.0

    def abort_request(self, request_id: str) -> None:
        """Give up one request; it completes at once, with reason ``aborted`` and what it has."""
        if request_id in self._transcripts:
            self._runtime.guard(self._runtime.handle, RequestAborted(request_id))

    async def abort(self) -> RolloutResult:
        """Give up everything unfinished and return the result."""
        for request_id in list(self._transcripts):
            self.abort_request(request_id)
        return await self.wait()

    # What the runtime tells.

    def job(self, command: Dispatch, now: float) -> ChunkJob:
        """Write out a chunk for its engine and note that it is under way."""
        transcript = self._transcripts[command.request_id]
        siblings = transcript.siblings
        group = siblings.group
        siblings.instances[command.instance_id] = None
        job_id = f"{command.request_id}#{len(transcript.chunks)}@{command.instance_id}"
        self._flights[job_id] = Flight(command, now)
        return ChunkJob(
            id=job_id,
            request_id=command.request_id,
            group_id=group.id,
            # A sum, so that what a simulated engine has not written out stays so.
            token_ids=siblings.prompt + transcript.token_ids,
            prompt_tokens=len(siblings.prompt),
            max_tokens=command.max_tokens,
            sampling=group.sampling,
            seed=transcript.seed,
            weight_version=self._runtime.weight_version,
            known_tokens=group.known_lengths[transcript.index] if group.known_lengths else None,
            probe=transcript.index == 0,
            siblings_finished=group.n - siblings.left,
            last=len(transcript.token_ids) + command.max_tokens == group.max_tokens,
            rollout_id=self._id,
        )

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Append a chunk's tokens and let the scheduler go on; a chunk no longer wanted is ignored.

        One with log-probs that are not finite counts as failed.
        """
        flight = self._flights.get(output.job_id)
        if flight is None:
            return
        # What a simulated engine has not written out needs no look.
        if isinstance(output.logprobs, list) and not math.isfinite(sum(output.logprobs)):
            reason = "its log-probs are no finite numbers"
            self._runtime.chunk_failed(instance_id, output.job_id, reason)
            return
        del self._flights[output.job_id]
        if output.weight_version != self._runtime.weight_version:
            raise WeightVersionError(
                f"chunk {output.job_id!r} was computed with weight version {output.weight_version}, the"
                f" rollout runs on {self._runtime.weight_version}"
            )
        transcript = self._transcripts[flight.dispatch.request_id]
        tokens = len(output.token_ids)
        if len(output.logprobs) != tokens:
            raise TransitionError(
                f"instance {instance_id!r} answered chunk {output.job_id!r} with {tokens} tokens but"
                f" {len(output.logprobs)} log-probs; its engine broke the contract"
            )
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
                steps=output.steps,
                drafted_at=output.drafted_at,
                accepted_at=output.accepted_at,
                pool_tokens=output.pool_tokens,
            )
        )
        self._runtime.handle(
            ChunkFinished(
                flight.dispatch.request_id,
                instance_id,
                tokens,
                output.stopped,
                output.steps,
                sum(output.drafted_at),
                sum(output.accepted_at),
                output.cached_tokens,
                output.pool_tokens,
                output.prefilled_tokens,
            )
        )

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Let the scheduler decide about a chunk that was given back."""
        flight = self._flights.pop(job_id, None)
        if flight is not None:
            self._first_failure = self._first_failure or f"instance {instance_id!r}: {reason}"
            self._runtime.handle(ChunkFailed(flight.dispatch.request_id, instance_id, reason))

    def instance_lost(self, instance_id: str) -> None:
        """Forget what was under way on an instance."""
        self._instances_lost += 1
        self._flights = {
            job_id: flight
            for job_id, flight in self._flights.items()
            if flight.dispatch.instance_id != instance_id
        }

    def instance_given_up(self) -> None:
        """Count an instance that is not started again."""
        self._instances_given_up += 1

    def instance_troubled(self, trouble: InstanceTroubled) -> None:
        """Count what an instance works without."""
        self._troubles.append(trouble)

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
        siblings = transcript.siblings
        tokens, limit = len(transcript.token_ids), siblings.group.max_tokens
        if tokens > limit or (tokens < limit and command.finish_reason == "length"):
            raise PluginError(
                f"request {command.request_id!r} ended at its limit of {limit} tokens with {tokens}: a"
                " plug-in has changed what it was given; run with --debug to see which"
            )
        tokenizer = self._runtime.pool.tokenizer
        completion = Completion(
            request_id=command.request_id,
            group_id=siblings.group.id,
            index=transcript.index,
            seed=transcript.seed,
            token_ids=transcript.token_ids,
            logprobs=transcript.logprobs,
            text=tokenizer.decode(transcript.token_ids) if tokenizer is not None else None,
            finish_reason=command.finish_reason,
            weight_version=self._runtime.weight_version,
            chunks=transcript.chunks,
            instances=list(dict.fromkeys([chunk.instance for chunk in transcript.chunks])),
            finished_s=now,
            metadata=siblings.group.metadata,
        )
        self._completions.append(completion)
        self._ready.append(completion)
        self._runtime.changed.set()
        siblings.left -= 1
        if not siblings.left:
            self._runtime.forget_group(completion.group_id, siblings.instances)
        if not self._transcripts:
            log.info("rollout_finished", requests=len(self._completions))
            if all(each.finish_reason == "error" for each in self._completions):
                self._error = EngineError(
                    f"all {len(self._completions)} requests ended in an error, the first on"
                    f" {self._first_failure}; mend that, then run again"
                )
            self._runtime.rollout_finished(self)

    def fail(self, error: BaseException) -> None:
        """End the rollout with an error; what has finished stays."""
        if self._error is None:
            self._error = error
            self._runtime.rollout_failed(self._flights)


def _recomputed(output: ChunkOutput, continued: bool) -> int:
    """Positions that this chunk ran through the model although an earlier step had done so.

    Fresh work is the first chunk's prefill, and one position per new token but the last; a continued
    request also owes the position of its last token, which was sampled but never run.
    """
    fresh = len(output.token_ids) + (0 if continued else output.prefilled_tokens - 1)
    return max(0, output.computed_tokens - fresh)
