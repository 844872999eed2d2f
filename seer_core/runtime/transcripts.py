"""The transcripts of one rollout: the tokens of each response so far, and the chunks under way."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from itertools import count
from typing import Any, TypeVar, cast

import attrs
import msgspec

from seer_core.errors import PluginError, TransitionError, WeightVersionError
from seer_core.model import ChunkRecord, Completion, PromptGroup, Sampling, TurnRecord, WrittenResponse
from seer_core.model.arrays import LEAST_LOGPROB, Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.events import (
    ChunkFailed,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    GroupSpec,
    ResumedResponse,
)
from seer_core.ports.drafting import SiblingTokens
from seer_core.ports.engine import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.ports.extension import HeldResponse
from seer_core.scheduling.sibling_tokens import SiblingLog

__all__ = ["ClosedRequest", "ReadText", "Transcripts"]

A = TypeVar("A", Tokens, Logprobs)

ReadText = Callable[[Sampling, Sequence[int], Sequence[int], bool], tuple[str | None, str | int | None]]
"""Returns a response's text, and the stop string or token at which it ends, if there are any.

Called with its sampling, the tokens of its prompt and its own, and whether it ended before its limit.
"""

_WRITTEN_OUT = (list, Tokens, Logprobs)
"""Types of tokens and log-probs that are there, not lazy; a tuple, since a union is made at each use."""


@attrs.define(eq=False)
class Siblings:
    """The part that the transcripts of a group share.

    ``left`` counts the responses that are not over; ``whole`` ones are not divided.  ``instances`` were sent
    chunks of the group, ``running`` counts the chunks under way on each.
    """

    group: PromptGroup
    prompt: list[int]
    left: int
    whole: bool = False
    instances: dict[str, None] = attrs.Factory(dict)
    running: dict[str, int] = attrs.Factory(dict)


@attrs.define(eq=False)
class Transcript:
    """A response so far; ``job_id`` names the chunk under way.

    An earlier process has written its first ``resumed_tokens``.  ``streamed`` holds the tokens and log-probs
    of the chunk's pieces.  ``top_logprobs``, ``streamed_tops`` and ``prompt_logprobs`` are there where the
    sampling asks for them.  ``turns`` are those that have been extended, ``turn_start`` is where the next one
    begins.  It is held since ``held_s``.  No chunk has run the ``unread`` last tokens of the extension, which
    may have brought ``attachments`` for all chunks from there on.
    """

    siblings: Siblings
    index: int
    seed: int
    token_ids: Tokens = attrs.Factory(Tokens)
    logprobs: Logprobs = attrs.Factory(Logprobs)
    chunks: list[ChunkRecord] = attrs.Factory(list)
    resumed_tokens: int = 0
    job_id: str | None = None
    streamed: tuple[Tokens, Logprobs] | None = None
    top_logprobs: TopLogprobs | None = None
    streamed_tops: TopLogprobs | None = None
    prompt_logprobs: PromptLogprobs | None = None
    turns: list[TurnRecord] = attrs.Factory(list)
    turn_start: int = 0
    held_s: float = 0.0
    unread: int = 0
    attachments: Mapping[str, Any] | None = None
    error: str | None = None

    @property
    def trajectory(self) -> str:
        """The trajectory of which it is a turn; empty for none."""
        names = self.siblings.group.trajectories
        return names[self.index] if names else ""


class InFlightChunk(msgspec.Struct):
    """A chunk under way: the command that sent it, when, and whether its instance is to end it early."""

    dispatch: Dispatch
    dispatched_s: float
    ending: bool = False


class ClosedRequest(msgspec.Struct, frozen=True):
    """A request that is over, whether its group is, and if so the ``instances`` that may forget it.

    An earlier process has written its first ``resumed_tokens``.  It was a turn of ``trajectory``, if named.
    """

    completion: Completion
    prompt: Sequence[int]
    group_over: bool
    resumed_tokens: int
    instances: tuple[str, ...] = ()
    trajectory: str = ""


class Transcripts:
    """Turns commands into jobs, engines' answers into events, and finished transcripts into completions.

    It has no clock, no engine and no scheduler: times are arguments, and answers are returned.  Groups may
    come at any time, and are dropped when they are over.  ``rollout_id`` must be unique among all rollouts
    anywhere.  ``read_text`` gives completions their text.  With ``sharing``, ``pending`` returns sibling
    tokens for other instances, and finished responses are kept until their group is over, for instances that
    join late.
    ``chunk_numbers`` is shared by all rollouts of a run: ids of requests may come again, those of chunks not,
    or a late answer to a dropped chunk would pass for that of another one.
    """

    def __init__(
        self,
        weight_version: int = 0,
        rollout_id: str = "",
        read_text: ReadText | None = None,
        *,
        sharing: bool = False,
        chunk_numbers: Iterator[int] | None = None,
    ) -> None:
        self.weight_version = weight_version
        self.sharing = sharing
        self._rollout_id = rollout_id
        self._read_text = read_text
        self._chunk_numbers = count() if chunk_numbers is None else chunk_numbers
        self._in_flight: dict[str, InFlightChunk] = {}
        self._open: dict[str, Transcript] = {}
        self._groups: dict[str, Siblings] = {}
        self._shared: dict[str, SiblingLog] = {}
        self._families: dict[str, dict[str, int]] = {}
        """The chunks under way on each instance, of each family."""

    @property
    def unfinished(self) -> Collection[str]:
        """The ids of the requests that are not over."""
        return self._open.keys()

    @property
    def groups(self) -> Collection[str]:
        """The ids of the groups that are not over."""
        return self._groups.keys()

    def add(
        self,
        group: PromptGroup,
        written: Sequence[WrittenResponse] = (),
        earlier: Sequence[Tokens] = (),
        home: str = "",
        *,
        whole: bool = False,
    ) -> GroupSpec:
        """Begin the transcripts of a group; return its specification for the scheduler.

        Args:
            group: the group.
            written: its responses as an earlier process left them, which become part of these; or none.
            earlier: responses of earlier rollouts to its prompt, which are pending like siblings' tokens.
            home: the instance that has the KV of its trajectory; empty for none.
            whole: its responses are not divided.
        """
        siblings = Siblings(group, list(group.prompt_token_ids), group.n, whole)
        self._groups[group.id] = siblings
        name = group.family or group.id
        if self.sharing:
            if group.family:
                siblings.running = self._families.setdefault(name, siblings.running)
            if name not in self._shared:
                shared = self._shared[name] = SiblingLog(self._rollout_id, name)
                for number, token_ids in enumerate(earlier):
                    shared.resume(f"{group.id}/earlier-{number}", token_ids)
        for index in range(group.n):
            request_id = f"{group.id}/{index}"
            transcript = Transcript(siblings, index, group.seed_of(index))
            if group.sampling.top_logprobs:
                transcript.top_logprobs = TopLogprobs(group.sampling.top_logprobs)
            self._open[request_id] = transcript
            if written:
                response = written[index]
                transcript.token_ids, transcript.logprobs = response.token_ids, response.logprobs
                transcript.chunks, transcript.resumed_tokens = response.chunks, len(response.token_ids)
                transcript.prompt_logprobs = response.prompt_logprobs
                transcript.turns, transcript.attachments = response.turns, response.attachments
                transcript.turn_start = sum(turn.tokens + turn.answer_tokens for turn in response.turns)
                if response.turns and transcript.turn_start == len(response.token_ids):
                    transcript.unread = response.turns[-1].answer_tokens
                if response.top_logprobs is not None:
                    transcript.top_logprobs = response.top_logprobs
                if self.sharing:
                    self._shared[name].resume(request_id, transcript.token_ids)
        return GroupSpec(
            group.id,
            len(group.prompt_token_ids),
            group.n,
            group.max_tokens,
            group.known_lengths,
            group.sampling,
            dict(group.labels),
            tuple(ResumedResponse(len(each.token_ids), each.finish_reason, each.acting) for each in written),
            group.turns,
            group.family,
            home,
            whole,
        )

    def forget(self, family: str) -> None:
        """Drop what the responses of a family have written, if they do so."""
        self._shared.pop(family, None)
        self._families.pop(family, None)

    def unfinished_of(self, group_id: str) -> list[str]:
        """Return the ids of a group's requests that are not over."""
        siblings = self._groups.get(group_id)
        names = () if siblings is None else (f"{group_id}/{index}" for index in range(siblings.group.n))
        return [name for name in names if name in self._open]

    def written(self, request_id: str, start: int = 0) -> tuple[Tokens, Logprobs]:
        """Return copies of the tokens and log-probs of an unfinished request, from ``start`` on.

        They end with its last chunk, or with the last piece of the chunk under way.
        """
        transcript = self._open[request_id]
        tokens, logprobs = transcript.token_ids[start:], transcript.logprobs[start:]
        if transcript.streamed is not None:
            seen = max(0, start - len(transcript.token_ids))
            tokens = _joined(tokens, transcript.streamed[0][seen:])
            logprobs = _joined(logprobs, transcript.streamed[1][seen:])
        return tokens, logprobs

    def top_logprobs(self, request_id: str, start: int, end: int) -> TopLogprobs | None:
        """Return a copy of an unfinished request's most probable tokens from place ``start`` to ``end``.

        There are none where its sampling does not ask for them.
        """
        transcript = self._open[request_id]
        if transcript.top_logprobs is None:
            return None
        tops = transcript.top_logprobs[start:end]
        if transcript.streamed_tops is not None:
            before = len(transcript.top_logprobs)
            tops.extend(transcript.streamed_tops[max(0, start - before) : max(0, end - before)])
        return tops

    def prompt_logprobs(self, request_id: str) -> PromptLogprobs | None:
        """Return the log-probs of an unfinished request's prompt, once its first chunk has ended.

        There are none where its sampling does not ask for them.
        """
        return self._open[request_id].prompt_logprobs

    def last_chunk(self, request_id: str) -> tuple[int, ChunkRecord]:
        """Return where the last chunk of an unfinished request begins in its response, and its account."""
        transcript = self._open[request_id]
        record = transcript.chunks[-1]
        return len(transcript.token_ids) - record.tokens, record

    def written_tokens(self, request_id: str) -> int:
        """Return the number of tokens that an unfinished request has."""
        transcript = self._open[request_id]
        return len(transcript.token_ids) + (0 if transcript.streamed is None else len(transcript.streamed[0]))

    @property
    def under_way(self) -> list[tuple[str, str]]:
        """The chunks under way: the instance and the id of each."""
        return [(chunk.dispatch.instance_id, job_id) for job_id, chunk in self._in_flight.items()]

    def job(self, command: Dispatch, now: float) -> ChunkJob:
        """Return a chunk for its engine, which is under way from now on."""
        transcript = self._open[command.request_id]
        siblings = transcript.siblings
        group, written = siblings.group, transcript.token_ids
        siblings.instances[command.instance_id] = None
        siblings.running[command.instance_id] = siblings.running.get(command.instance_id, 0) + 1
        number = next(self._chunk_numbers)
        transcript.job_id = f"{command.request_id}#{number}@{command.instance_id}"
        self._in_flight[transcript.job_id] = InFlightChunk(command, now)
        if self.sharing:
            self._delivered(command.instance_id, command.request_id)
        return ChunkJob(  # with more than 15 arguments by name Python makes a dict, which takes 1.4 us
            transcript.job_id,
            command.request_id,
            group.family or group.id,
            _context(siblings.prompt, written),
            len(siblings.prompt),
            command.max_tokens,
            group.sampling,
            transcript.seed,
            weight_version=self.weight_version,
            known_tokens=group.known_lengths[transcript.index] if group.known_lengths else None,
            probe=transcript.index == 0,
            siblings_finished=group.n - siblings.left,
            last=len(written) + command.max_tokens == group.max_tokens,
            rollout_id=self._rollout_id,
            streams=group.streams,
            may_end_early=command.reserved_tokens is not None,
            turns=group.turns,
            turn_start=len(siblings.prompt) + transcript.turn_start if transcript.turn_start else 0,
            trajectory=transcript.trajectory,
            attachments=group.attachments if transcript.attachments is None else transcript.attachments,
            whole=siblings.whole,
        )

    def streamed(self, piece: ChunkPiece) -> str | None:
        """Append what a chunk has written; return the request's id if that was new, else None.

        A chunk that was begun anew on its instance may repeat tokens.  A piece that leaves out tokens, or
        whose log-probs are not finite, is dropped: its tokens come with the end of the chunk.
        """
        chunk = self._in_flight.get(piece.job_id)
        if chunk is None:
            return None
        transcript = self._open[chunk.dispatch.request_id]
        wanted = transcript.top_logprobs
        if transcript.streamed is None:
            transcript.streamed = Tokens(), Logprobs()
            transcript.streamed_tops = None if wanted is None else TopLogprobs(wanted.width)
        tokens, logprobs = transcript.streamed
        repeated = len(tokens) - piece.start
        new = Tokens(piece.token_ids[repeated:]), Logprobs(piece.logprobs[repeated:])
        if repeated < 0 or not new[0] or len(new[0]) != len(new[1]) or not math.isfinite(sum(new[1])):
            return None
        if wanted is not None and transcript.streamed_tops is not None:
            tops = piece.top_logprobs
            if tops is None or not tops.fits(wanted.width, len(piece.token_ids)):
                return None
            transcript.streamed_tops.extend(tops[repeated:])
        tokens.extend(new[0])
        logprobs.extend(new[1])
        return chunk.dispatch.request_id

    def finished(
        self, instance_id: str, output: ChunkOutput, now: float
    ) -> ChunkFinished | ChunkFailed | None:
        """Append a chunk's tokens and return the event for the scheduler; None if the chunk was dropped.

        A chunk with log-probs that are not finite has failed.

        Raises:
            WeightVersionError: it was computed with other weights.
            TransitionError: its tokens and its log-probs are not of one number, or it lacks others that its
                sampling asks for.
        """
        chunk = self._in_flight.get(output.job_id)
        if chunk is None:
            return None
        # The lazy log-probs of a simulated engine are finite.
        if isinstance(output.logprobs, _WRITTEN_OUT) and not math.isfinite(sum(output.logprobs)):
            return self.failed(instance_id, output.job_id, "its log-probs are no finite numbers")
        request_id = self._land(output.job_id)
        if output.weight_version != self.weight_version:
            raise WeightVersionError(
                f"chunk {output.job_id!r} was computed with weight version {output.weight_version}, the"
                f" rollout runs on {self.weight_version}"
            )
        transcript = self._open[request_id]
        tokens = len(output.token_ids)
        if len(output.logprobs) != tokens:
            raise TransitionError(
                f"instance {instance_id!r} answered chunk {output.job_id!r} with {tokens} tokens but"
                f" {len(output.logprobs)} log-probs; its engine broke the contract"
            )
        if (wanted := transcript.top_logprobs) is not None and tokens:
            if (tops := output.top_logprobs) is None or not tops.fits(wanted.width, tokens):
                raise TransitionError(
                    f"instance {instance_id!r} answered chunk {output.job_id!r} without the {wanted.width}"
                    f" most probable tokens for each of its {tokens}; its engine broke the contract"
                )
            wanted.extend(tops)
        continued = bool(transcript.chunks)
        if (asked := transcript.siblings.group.sampling.prompt_logprobs) is not None and not continued:
            found = transcript.prompt_logprobs = output.prompt_logprobs
            if found is None or not found.fits(asked, len(transcript.siblings.prompt)):
                raise TransitionError(
                    f"instance {instance_id!r} answered chunk {output.job_id!r} without the log-probs of its"
                    " prompt; its engine broke the contract"
                )
        transcript.token_ids = _joined(transcript.token_ids, output.token_ids)
        transcript.logprobs = _joined(transcript.logprobs, output.logprobs)
        transcript.chunks.append(
            ChunkRecord(
                instance=instance_id,
                tokens=tokens,
                dispatched_s=chunk.dispatched_s,
                finished_s=now,
                cached_tokens=output.cached_tokens,
                prefilled_tokens=output.prefilled_tokens,
                recomputed_tokens=_recomputed(output, continued, transcript.unread),
                preemptions=output.preemptions,
                weight_version=output.weight_version,
                steps=output.steps,
                drafted_at=output.drafted_at,
                accepted_at=output.accepted_at,
                pool_tokens=output.pool_tokens,
                attachments=output.attachments,
            )
        )
        transcript.unread = 0
        if self.sharing:
            self._delivered(instance_id, request_id)
        return ChunkFinished(
            request_id,
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

    def hold(self, request_id: str, now: float) -> None:
        """Note that a request is held from now on: it has written a turn."""
        self._open[request_id].held_s = now

    def held(self, request_id: str) -> HeldResponse:
        """Return a request that is held, for what extends it."""
        transcript = self._open[request_id]
        token_ids = transcript.token_ids
        if not isinstance(token_ids, Tokens):  # of a simulated engine
            token_ids = Tokens(token_ids)
        group, attachments = transcript.siblings.group, transcript.attachments
        return HeldResponse(
            group,
            transcript.index,
            transcript.seed,
            token_ids,
            tuple(transcript.turns),
            group.attachments if attachments is None else attachments,
        )

    def extend(
        self,
        request_id: str,
        token_ids: Sequence[int],
        reward: float | None,
        done: bool,
        now: float,
        attachments: Mapping[str, Any] | None = None,
    ) -> EnvironmentAnswered:
        """Append what extends a request, as far as there is room, and return the event for the scheduler."""
        transcript = self._open[request_id]
        written = len(transcript.token_ids)
        answer = Tokens(token_ids[: transcript.siblings.group.max_tokens - written])
        if not isinstance(transcript.token_ids, _WRITTEN_OUT):  # of a simulated engine
            transcript.token_ids = Tokens(transcript.token_ids)
            transcript.logprobs = Logprobs(transcript.logprobs)
        transcript.token_ids.extend(answer)
        transcript.logprobs.extend([0.0] * len(answer))
        if (tops := transcript.top_logprobs) is not None:
            others = [LEAST_LOGPROB] * (tops.width - 1)
            for token in answer:
                tops.extend(TopLogprobs(tops.width, [token] * tops.width, [0.0, *others]))
        turn_tokens = written - transcript.turn_start
        transcript.turns.append(TurnRecord(turn_tokens, len(answer), now - transcript.held_s, reward))
        transcript.turn_start = len(transcript.token_ids)
        transcript.unread = len(answer)
        if attachments is not None:
            transcript.attachments = attachments
        return EnvironmentAnswered(request_id, len(answer), done)

    def last_extension(self, request_id: str) -> tuple[int, Tokens, TurnRecord]:
        """Return where the last extension of an unfinished request begins, its tokens, and its turn."""
        transcript = self._open[request_id]
        turn = transcript.turns[-1]
        start = len(transcript.token_ids) - turn.answer_tokens
        return start, transcript.token_ids[start:], turn

    def extension_failed(self, request_id: str, reason: str) -> None:
        """Keep the reason for which nothing extends a request."""
        self._open[request_id].error = reason

    def failed(self, instance_id: str, job_id: str, reason: str) -> ChunkFailed | None:
        """Return the event for the scheduler when a chunk was given back; None if the chunk was dropped.

        The reason is that of the completion, if the request is not tried again.
        """
        if job_id not in self._in_flight:
            return None
        request_id = self._land(job_id)
        self._open[request_id].error = reason
        shared = self._sharing_of(request_id)
        if shared is not None:
            shared.lost(instance_id)  # it may not have received the chunk's text
        return ChunkFailed(request_id, instance_id, reason)

    def lost(self, instance_id: str) -> None:
        """Drop the chunks under way on an instance."""
        for job_id, chunk in list(self._in_flight.items()):
            if chunk.dispatch.instance_id == instance_id:
                self._land(job_id)
        for shared in self._shared.values():
            shared.lost(instance_id)

    def pending(self, request_id: str) -> list[tuple[str, SiblingTokens]]:
        """Return, by instance, the sibling tokens that instances with chunks of this request's group lack.

        Each text is returned once: after a chunk was sent to an instance, or has finished on another one.
        """
        shared = self._sharing_of(request_id)
        if shared is None:
            return []
        running = self._open[request_id].siblings.running
        return [(instance_id, text) for instance_id in running for text in shared.take_pending(instance_id)]

    def end(self, request_id: str) -> str:
        """Note that the chunk of a request that is under way is to end early, and return its id."""
        job_id = self._job_of(request_id)
        self._in_flight[job_id].ending = True
        return job_id

    def ending(self, instance_id: str | None = None) -> bool:
        """Return whether chunks that are to end early are under way, on one instance or on any."""
        return any(
            chunk.ending and instance_id in (None, chunk.dispatch.instance_id)
            for chunk in self._in_flight.values()
        )

    def drop(self, request_id: str) -> str:
        """Drop the chunk of a request that is under way and return its id."""
        job_id = self._job_of(request_id)
        self._land(job_id)
        return job_id

    def complete(self, command: Complete, now: float) -> ClosedRequest:
        """Turn a transcript into a completion.

        Raises:
            PluginError: its length does not fit its finish reason.
        """
        transcript = self._open.pop(command.request_id)
        siblings = transcript.siblings
        tokens, limit = len(transcript.token_ids), siblings.group.max_tokens
        if tokens > limit or (tokens < limit and command.finish_reason == "length"):
            raise PluginError(
                f"request {command.request_id!r} ended at its limit of {limit} tokens with {tokens}: a"
                " plug-in has changed what it was given; run with --debug to see which"
            )
        siblings.left -= 1
        family = siblings.group.family
        if not siblings.left:
            del self._groups[siblings.group.id]
            if not family:
                self._shared.pop(siblings.group.id, None)
        turns = transcript.turns
        if siblings.group.turns and tokens > transcript.turn_start:
            turns = [*turns, TurnRecord(tokens - transcript.turn_start)]
        rewards = [turn.reward for turn in turns if turn.reward is not None]
        text, stop_reason = None, None
        if self._read_text is not None:
            stopped = command.finish_reason == "stop" and not (turns and turns[-1].answer_tokens)
            response = siblings.group.sampling, siblings.prompt, transcript.token_ids, stopped
            text, stop_reason = self._read_text(*response)
        completion = Completion(
            request_id=command.request_id,
            group_id=siblings.group.id,
            index=transcript.index,
            seed=transcript.seed,
            token_ids=transcript.token_ids,
            logprobs=transcript.logprobs,
            text=text,
            finish_reason=command.finish_reason,
            weight_version=self.weight_version,
            chunks=transcript.chunks,
            instances=list(dict.fromkeys([chunk.instance for chunk in transcript.chunks])),
            finished_s=now,
            metadata=siblings.group.metadata,
            stop_reason=stop_reason,
            top_logprobs=transcript.top_logprobs,
            prompt_logprobs=transcript.prompt_logprobs,
            turns=turns,
            reward=sum(rewards) if rewards else None,
            attachments=transcript.attachments or {},
            error=transcript.error if command.finish_reason == "error" else None,
        )
        instances = () if siblings.left or family else tuple(siblings.instances)
        return ClosedRequest(
            completion,
            siblings.prompt,
            not siblings.left,
            transcript.resumed_tokens,
            instances,
            transcript.trajectory,
        )

    def _job_of(self, request_id: str) -> str:
        """Return the id of a request's chunk that is under way; a KeyError if there is none."""
        job_id = self._open[request_id].job_id
        if job_id is None:
            raise KeyError(request_id)
        return job_id

    def _delivered(self, instance_id: str, request_id: str) -> None:
        shared = self._sharing_of(request_id)
        if shared is not None:
            shared.record(instance_id, request_id, self._open[request_id].token_ids)

    def _sharing_of(self, request_id: str) -> SiblingLog | None:
        if not self.sharing:  # then there is nothing to look up
            return None
        group = self._open[request_id].siblings.group
        return self._shared.get(group.family or group.id)

    def _land(self, job_id: str) -> str:
        """Take a chunk from those under way and return the id of its request."""
        dispatch = self._in_flight.pop(job_id).dispatch
        transcript = self._open[dispatch.request_id]
        transcript.job_id = transcript.streamed = transcript.streamed_tops = None
        running = transcript.siblings.running
        running[dispatch.instance_id] -= 1
        if not running[dispatch.instance_id]:
            del running[dispatch.instance_id]
        return dispatch.request_id


def _context(prompt: list[int], written: Sequence[int]) -> list[int]:
    """Return the tokens that a chunk begins with; those of a simulated engine stay lazy, as a sum does."""
    if not written:
        return prompt  # itself: jobs are not changed
    return prompt + (written.tolist() if isinstance(written, Tokens) else written)  # type: ignore[operator]


def _joined(head: A, tail: Any) -> A:
    """Return ``head``, which may change in place, extended by ``tail``; a lazy series stays lazy."""
    if isinstance(tail, list):
        head.fromlist(tail)
    elif isinstance(tail, _WRITTEN_OUT):
        head.extend(tail)  # type: ignore[arg-type]
    elif isinstance(head, _WRITTEN_OUT):
        if not head:
            return cast("A", tail)
        head.extend(tail)
    else:
        head += tail
    return head


def _recomputed(output: ChunkOutput, continued: bool, unread: int) -> int:
    """Positions that this chunk ran through the model although an earlier step had done so.

    Fresh work is the first chunk's prefill, and one position per new token but the last; a continued
    request also owes the position of its last token, which was sampled but never run, and those of the
    environment's answer that are ``unread``.
    """
    fresh = len(output.token_ids) + (unread if continued else output.prefilled_tokens - 1)
    return max(0, output.computed_tokens - fresh)
