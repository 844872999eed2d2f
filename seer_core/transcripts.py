"""The book of one rollout: what has been written of each response, and which chunks are under way."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, TypeVar, cast

import attrs
import msgspec

from seer_core.arrays import Logprobs, Tokens
from seer_core.drafting import SiblingText
from seer_core.errors import PluginError, TransitionError, WeightVersionError
from seer_core.events import ChunkFailed, ChunkFinished, Complete, Dispatch, GroupSpec
from seer_core.model import ChunkRecord, Completion, Piece, PromptGroup, request_seed
from seer_core.ports import ChunkJob, ChunkOutput, ChunkPiece
from seer_core.sharing import SharedText

__all__ = ["Closed", "Transcripts"]

A = TypeVar("A", Tokens, Logprobs)


@attrs.define(eq=False)
class Siblings:
    """What the transcripts of a group share.

    ``left`` are not over, ``instances`` were given chunks of it, ``running`` counts those under way on each.
    """

    group: PromptGroup
    prompt: list[int]
    left: int
    instances: dict[str, None] = attrs.Factory(dict)
    running: dict[str, int] = attrs.Factory(dict)


@attrs.define(eq=False)
class Transcript:
    """What the user will get of one request, so far; ``job_id`` names its chunk under way.

    ``ahead`` is what that chunk has written up to its last piece, tokens and log-probs.
    """

    siblings: Siblings
    index: int
    seed: int
    token_ids: Tokens = attrs.Factory(Tokens)
    logprobs: Logprobs = attrs.Factory(Logprobs)
    chunks: list[ChunkRecord] = attrs.Factory(list)
    job_id: str | None = None
    ahead: tuple[Tokens, Logprobs] | None = None


class Flight(msgspec.Struct, frozen=True):
    """A chunk under way: the command that sent it, and when."""

    dispatch: Dispatch
    dispatched_s: float


class Closed(msgspec.Struct, frozen=True):
    """A request that is over, and whether its group is; if so, the instances that may forget the group."""

    completion: Completion
    group_over: bool
    forgetful: tuple[str, ...] = ()


class Transcripts:
    """Turns commands into jobs, what engines answer into events, and finished transcripts into completions.

    It knows no clock, no engine and no scheduler: times are arguments, and answers are returned.  Groups may
    come at any time, and are forgotten when they are over.  ``rollout_id`` must be another for each rollout
    anywhere.  ``decode`` makes text of tokens.  With ``sharing`` it also knows what to tell instances of text
    that others wrote, and keeps finished responses until their group is over, for those that join it late.
    ``dropped`` counts the chunks that were dropped under way, those of earlier rollouts included: ids of
    requests may come again, but those of chunks must not.
    """

    def __init__(
        self,
        weight_version: int = 0,
        rollout_id: str = "",
        decode: Callable[[Sequence[int]], str] | None = None,
        *,
        sharing: bool = False,
        dropped: int = 0,
    ) -> None:
        self.weight_version = weight_version
        self.dropped = dropped
        self._sharing = sharing
        self._rollout_id = rollout_id
        self._decode = decode
        self._flights: dict[str, Flight] = {}
        self._open: dict[str, Transcript] = {}
        self._groups: dict[str, Siblings] = {}
        self._shared: dict[str, SharedText] = {}

    def __len__(self) -> int:
        """Return how many requests are not over."""
        return len(self._open)

    def __iter__(self) -> Iterator[str]:
        """Return the ids of the requests that are not over, as they are now."""
        return iter(list(self._open))

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    @property
    def groups(self) -> Collection[str]:
        """The ids of the groups that are not over."""
        return self._groups.keys()

    def add(self, group: PromptGroup) -> GroupSpec:
        """Begin the transcripts of a group; return it without its tokens, as the scheduler gets it."""
        siblings = self._groups[group.id] = Siblings(group, list(group.prompt_token_ids), group.n)
        if self._sharing:
            self._shared[group.id] = SharedText(self._rollout_id, group.id)
        for index in range(group.n):
            seed = request_seed(group.seed, index)
            self._open[f"{group.id}/{index}"] = Transcript(siblings, index, seed)
        return GroupSpec(
            group.id,
            len(group.prompt_token_ids),
            group.n,
            group.max_tokens,
            group.known_lengths,
            group.sampling,
            dict(group.labels),
        )

    def unfinished(self, group_id: str) -> list[str]:
        """Return the ids of a group's requests that are not over."""
        siblings = self._groups.get(group_id)
        names = () if siblings is None else (f"{group_id}/{index}" for index in range(siblings.group.n))
        return [name for name in names if name in self._open]

    def written(self, request_id: str, start: int = 0) -> tuple[Tokens, Logprobs]:
        """Return what a request that is not over has written so far, without its first ``start`` tokens.

        That is up to the end of its last chunk, or up to the last piece of one under way.
        """
        transcript = self._open[request_id]
        tokens, logprobs = transcript.token_ids[start:], transcript.logprobs[start:]
        if transcript.ahead is not None:
            seen = max(0, start - len(transcript.token_ids))
            tokens = _joined(tokens, transcript.ahead[0][seen:])
            logprobs = _joined(logprobs, transcript.ahead[1][seen:])
        return tokens, logprobs

    def written_tokens(self, request_id: str) -> int:
        """Return how many tokens that is, all of them."""
        transcript = self._open[request_id]
        return len(transcript.token_ids) + (0 if transcript.ahead is None else len(transcript.ahead[0]))

    @property
    def under_way(self) -> list[tuple[str, str]]:
        """The chunks under way: the instance and the id of each."""
        return [(flight.dispatch.instance_id, job_id) for job_id, flight in self._flights.items()]

    def job(self, command: Dispatch, now: float) -> ChunkJob:
        """Write out a chunk for its engine and note that it is under way."""
        transcript = self._open[command.request_id]
        siblings = transcript.siblings
        group, written = siblings.group, transcript.token_ids
        siblings.instances[command.instance_id] = None
        siblings.running[command.instance_id] = siblings.running.get(command.instance_id, 0) + 1
        job_id = f"{command.request_id}#{len(transcript.chunks)}@{command.instance_id}"
        # A late answer to a chunk that was dropped must not pass for that of another one.
        transcript.job_id = f"{job_id}~{self.dropped}" if self.dropped else job_id
        self._flights[transcript.job_id] = Flight(command, now)
        self._know(command.instance_id, command.request_id)
        return ChunkJob(
            id=transcript.job_id,
            request_id=command.request_id,
            group_id=group.id,
            # Otherwise a sum, so that what a simulated engine has not written out stays so.
            token_ids=siblings.prompt + (written.tolist() if isinstance(written, Tokens) else written),
            prompt_tokens=len(siblings.prompt),
            max_tokens=command.max_tokens,
            sampling=group.sampling,
            seed=transcript.seed,
            weight_version=self.weight_version,
            known_tokens=group.known_lengths[transcript.index] if group.known_lengths else None,
            probe=transcript.index == 0,
            siblings_finished=group.n - siblings.left,
            last=len(written) + command.max_tokens == group.max_tokens,
            rollout_id=self._rollout_id,
            streams=group.streams,
        )

    def grew(self, piece: ChunkPiece) -> Piece | None:
        """Note what a chunk has written and return what of it is new; None if it is no longer wanted.

        A chunk that was begun anew where it ran may tell what is known again.  One that has left out
        something, or whose log-probs are not finite, is shown when it ends.
        """
        flight = self._flights.get(piece.job_id)
        if flight is None:
            return None
        transcript = self._open[flight.dispatch.request_id]
        if transcript.ahead is None:
            transcript.ahead = Tokens(), Logprobs()
        tokens, logprobs = transcript.ahead
        known = len(tokens) - piece.start
        new = Tokens(piece.token_ids[known:]), Logprobs(piece.logprobs[known:])
        if known < 0 or not new[0] or len(new[0]) != len(new[1]) or not math.isfinite(sum(new[1])):
            return None
        start = len(transcript.token_ids) + len(tokens)
        tokens.extend(new[0])
        logprobs.extend(new[1])
        return Piece(flight.dispatch.request_id, start, *new)

    def finished(
        self, instance_id: str, output: ChunkOutput, now: float
    ) -> ChunkFinished | ChunkFailed | None:
        """Append a chunk's tokens and return what the scheduler must know; None if it is no longer wanted.

        A chunk with log-probs that are not finite has failed.

        Raises:
            WeightVersionError: it was computed with other weights.
            TransitionError: its tokens and its log-probs are not of one number.
        """
        flight = self._flights.get(output.job_id)
        if flight is None:
            return None
        # What a simulated engine has not written out needs no look.
        if isinstance(output.logprobs, list | Logprobs) and not math.isfinite(sum(output.logprobs)):
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
        continued = bool(transcript.chunks)
        transcript.token_ids = _joined(transcript.token_ids, output.token_ids)
        transcript.logprobs = _joined(transcript.logprobs, output.logprobs)
        transcript.chunks.append(
            ChunkRecord(
                instance=instance_id,
                tokens=tokens,
                dispatched_s=flight.dispatched_s,
                finished_s=now,
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
        self._know(instance_id, request_id)
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

    def failed(self, instance_id: str, job_id: str, reason: str) -> ChunkFailed | None:
        """Return what the scheduler must know of a chunk given back; None if it is no longer wanted."""
        if job_id not in self._flights:
            return None
        request_id = self._land(job_id)
        shared = self._shared_by(request_id)
        if shared is not None:
            shared.lost(instance_id)  # it may not even have taken the chunk's text
        return ChunkFailed(request_id, instance_id, reason)

    def lost(self, instance_id: str) -> None:
        """Forget what was under way on an instance."""
        for job_id, flight in list(self._flights.items()):
            if flight.dispatch.instance_id == instance_id:
                self._land(job_id)
        for shared in self._shared.values():
            shared.lost(instance_id)

    def untold(self, request_id: str) -> list[tuple[str, SiblingText]]:
        """Return what instances that run chunks of this request's group lack of its text, by instance.

        They are told once: when one has been given a chunk, and when a chunk has finished elsewhere.
        """
        shared = self._shared_by(request_id)
        if shared is None:
            return []
        running = self._open[request_id].siblings.running
        return [(instance_id, text) for instance_id in running for text in shared.tell(instance_id)]

    def forget(self, request_id: str) -> str:
        """Drop the chunk of a request that is under way and return its id."""
        job_id = self._open[request_id].job_id
        if job_id is None:
            raise KeyError(request_id)
        self._land(job_id)
        self.dropped += 1
        return job_id

    def complete(self, command: Complete, now: float) -> Closed:
        """Turn a transcript into a completion.

        Raises:
            PluginError: it has another length than its end allows.
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
        if not siblings.left:
            del self._groups[siblings.group.id]
            self._shared.pop(siblings.group.id, None)
        completion = Completion(
            request_id=command.request_id,
            group_id=siblings.group.id,
            index=transcript.index,
            seed=transcript.seed,
            token_ids=transcript.token_ids,
            logprobs=transcript.logprobs,
            text=self._decode(transcript.token_ids) if self._decode is not None else None,
            finish_reason=command.finish_reason,
            weight_version=self.weight_version,
            chunks=transcript.chunks,
            instances=list(dict.fromkeys([chunk.instance for chunk in transcript.chunks])),
            finished_s=now,
            metadata=siblings.group.metadata,
        )
        return Closed(completion, not siblings.left, () if siblings.left else tuple(siblings.instances))

    def _know(self, instance_id: str, request_id: str) -> None:
        """Note that an instance has a request's text as it is now."""
        shared = self._shared_by(request_id)
        if shared is not None:
            shared.know(instance_id, request_id, self._open[request_id].token_ids)

    def _shared_by(self, request_id: str) -> SharedText | None:
        """Return what is known of the text of a request's group; None if instances share none."""
        return self._shared.get(self._open[request_id].siblings.group.id)

    def _land(self, job_id: str) -> str:
        """Note that a chunk is no longer under way and return the id of its request."""
        dispatch = self._flights.pop(job_id).dispatch
        transcript = self._open[dispatch.request_id]
        transcript.job_id = transcript.ahead = None
        running = transcript.siblings.running
        running[dispatch.instance_id] -= 1
        if not running[dispatch.instance_id]:
            del running[dispatch.instance_id]
        return dispatch.request_id


def _joined(head: A, tail: Any) -> A:
    """Return the values of ``head``, which may change, and then of ``tail``: an array, list or series.

    A series that is written out when somebody looks stays one.
    """
    if isinstance(tail, list):
        head.fromlist(tail)
    elif isinstance(tail, Tokens | Logprobs):
        head.extend(tail)  # type: ignore[arg-type]
    else:
        return cast("A", head + tail if head else tail)
    return head


def _recomputed(output: ChunkOutput, continued: bool) -> int:
    """Positions that this chunk ran through the model although an earlier step had done so.

    Fresh work is the first chunk's prefill, and one position per new token but the last; a continued
    request also owes the position of its last token, which was sampled but never run.
    """
    fresh = len(output.token_ids) + (0 if continued else output.prefilled_tokens - 1)
    return max(0, output.computed_tokens - fresh)
