"""Events of a rollout, and the commands with which the scheduler answers them.

``msgspec.Struct`` instead of attrs: the trace needs tagged unions, and one costs 0.1 us to make.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from seer_core.model.requests import FinishReason, InstanceInfo
from seer_core.model.sampling import Sampling

__all__ = [
    "Abort",
    "AskEnvironment",
    "ChunkFailed",
    "ChunkFinished",
    "Command",
    "Complete",
    "Dispatch",
    "EndChunk",
    "EnvironmentAnswered",
    "EnvironmentFailed",
    "Event",
    "GroupSpec",
    "GroupsSubmitted",
    "InstanceDegraded",
    "InstanceFailed",
    "InstanceLeaving",
    "InstanceLimited",
    "InstanceLost",
    "InstanceReported",
    "InstanceStarted",
    "InstanceStopped",
    "InstanceWaiting",
    "RequestsAborted",
    "ResumedResponse",
    "RolloutPaused",
    "RolloutResumed",
]


class ResumedResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response that an earlier process began."""

    tokens: int
    """The tokens that it has so far."""
    finish_reason: FinishReason | None = None
    """The reason why it is over; none while it is not."""
    acting: bool = False
    """Whether its environment has not answered its last turn."""


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt group without its tokens: all that scheduling needs, and the part that the trace keeps."""

    id: str
    """The group's id."""
    prompt_tokens: int
    """The tokens of its prompt."""
    n: int
    """How many responses are wanted."""
    max_tokens: int
    """The most tokens of each response, prompt excluded."""
    known_lengths: tuple[int, ...] | None = None
    """The tokens of each response, where they are known beforehand; only an oracle or a simulated engine
    reads them.
    """
    sampling: Sampling = Sampling()
    """How tokens are drawn."""
    labels: dict[str, str] = {}
    """The prompt's labels, which strategies see."""
    resumed: tuple[ResumedResponse, ...] = ()
    """Its responses as an earlier process left them; empty for none."""
    turns: bool = False
    """Whether an environment answers the turns of its responses."""
    family: str = ""
    """The family that it is of, whose groups are siblings to each other; empty for none."""
    home: str = ""
    """The instance that has the KV of its trajectory; empty for none."""
    whole: bool = False
    """Whether its responses are not divided, for the engines cannot go on with one under its sampling."""


class GroupsSubmitted(msgspec.Struct, frozen=True, tag=True):
    """New prompt groups, in order of arrival; all of one event are known before any of them runs."""

    groups: tuple[GroupSpec, ...]
    """The groups, in order of arrival."""


class InstanceStarted(msgspec.Struct, frozen=True, tag=True):
    """An instance is ready for chunks, for the first time or again.

    If it was up, a rollout had failed, whose requests are gone, and the scheduler is a new one.
    """

    info: InstanceInfo
    """The instance's name and limits."""


class InstanceLost(msgspec.Struct, frozen=True, tag=True):
    """An instance is gone, and every unfinished chunk on it with it."""

    instance_id: str
    """The instance that is gone."""
    reason: str
    """The reason, in words."""


class InstanceFailed(msgspec.Struct, frozen=True, tag=True):
    """A lost instance is not started again: it was lost too often, or its restarts failed."""

    instance_id: str
    """The instance that stays down."""
    reason: str
    """The reason, in words."""


class InstanceWaiting(msgspec.Struct, frozen=True, tag=True):
    """A lost instance has no place to start again yet, as on a cluster without room for it."""

    instance_id: str
    """The instance that waits."""
    missing: str
    """What is missing, in words."""


class InstanceLeaving(msgspec.Struct, frozen=True, tag=True):
    """An instance takes no more chunks and is ended soon; what it runs may still end there."""

    instance_id: str
    """The instance that leaves."""
    reason: str
    """The reason, in words."""
    by: str = ""
    """The person or program that asked for it, if one is named."""


class InstanceLimited(msgspec.Struct, frozen=True, tag=True):
    """An instance is sent chunks only while fewer than ``max_running`` run there, until it starts anew.

    Chunks beyond that which run already go on to their ends.
    """

    instance_id: str
    """The instance."""
    max_running: int
    """The most chunks from now on: one at least, and no more than its engine runs at once."""
    by: str = ""
    """The person or program that asked for it, if one is named."""


class InstanceStopped(msgspec.Struct, frozen=True, tag=True):
    """An instance was ended on purpose; unfinished chunks on it are void, and it may start again."""

    instance_id: str
    """The instance that was ended."""


class InstanceReported(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An engine's own telemetry."""

    instance_id: str
    """The instance that reports."""
    running: int
    """Requests that it decodes."""
    waiting: int
    """Requests that wait in its own queue."""
    kv_usage: float
    """The share of its KV blocks that is in use."""
    stepping_s: float = 0.0
    """The time that it has spent in steps since its start."""
    drafting_s: float = 0.0
    """The part of ``stepping_s`` that was spent on drafts."""
    drafting: dict[str, float] = {}
    """Figures of its draft source, by name."""
    emulated_s: float = 0.0
    """Of an engine that emulates an accelerator in real time: how long its steps should have taken, in
    emulated time.
    """
    overrun_s: float = 0.0
    """Of such an engine: how much longer its steps have taken, in emulated time."""


class InstanceDegraded(msgspec.Struct, frozen=True, tag=True):
    """A part of an instance fails, and the instance works on without it; may come before its start."""

    instance_id: str
    """The instance."""
    what: str
    """The part: ``drafting``, ``kv_pool``, or ``pace`` where an emulated accelerator is faster than the
    machine, so that times are not valid.
    """
    reason: str
    """The reason, in words."""
    log: str | None = None
    """The file in which the instance's process says more, if there is one."""


class ChunkFinished(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A chunk came to its end.

    The KV of its context was cached, came from the pool, or was prefilled.
    """

    request_id: str
    """The request that the chunk is of."""
    instance_id: str
    """The instance on which it ran."""
    tokens: int
    """The new tokens that it brought."""
    stopped: bool
    """Whether the model ended the response, or its turn, by EOS, a stop token or a stop string; otherwise the
    chunk's length ended the chunk.
    """
    steps: int = 0
    """The engine steps that gave it tokens."""
    drafted: int = 0
    """The draft tokens that these steps verified."""
    accepted: int = 0
    """The draft tokens that these steps accepted."""
    cached_tokens: int = 0
    """The tokens of its context whose KV the instance's own cache had."""
    pool_tokens: int = 0
    """The tokens of its context whose KV came from the pool."""
    prefilled_tokens: int = 0
    """The tokens of its context that were computed before the first new one."""


class ChunkFailed(msgspec.Struct, frozen=True, tag=True):
    """A living instance gave a chunk back without a result; its tokens, if any, are discarded."""

    request_id: str
    """The request that the chunk is of."""
    instance_id: str
    """The instance that gave it back."""
    reason: str
    """The reason, in words."""


class EnvironmentAnswered(msgspec.Struct, frozen=True, gc=False, tag=True):
    """The environment of a request has answered its last turn."""

    request_id: str
    """The request."""
    tokens: int
    """The tokens of the answer, as many as the response has room for."""
    done: bool
    """Whether the response ends with the answer; otherwise the model goes on after it."""


class EnvironmentFailed(msgspec.Struct, frozen=True, tag=True):
    """The environment of a request has failed on its last turn."""

    request_id: str
    """The request."""
    reason: str
    """The reason, in words."""


class RequestsAborted(msgspec.Struct, frozen=True, tag=True):
    """The user no longer wants these requests; none of them runs in another's place."""

    request_ids: tuple[str, ...]
    """The requests, as ``GROUP/INDEX``."""
    by: str = ""
    """The person or program that asked for it, if one is named."""


class RolloutPaused(msgspec.Struct, frozen=True, tag=True):
    """No chunk is sent until ``RolloutResumed``; those in flight are ended early."""

    by: str = ""
    """The person or program that asked for it, if one is named."""


class RolloutResumed(msgspec.Struct, frozen=True, tag=True):
    """Chunks are sent again."""

    by: str = ""
    """The person or program that asked for it, if one is named."""


Event = (
    GroupsSubmitted
    | InstanceStarted
    | InstanceLeaving
    | InstanceLimited
    | InstanceStopped
    | InstanceLost
    | InstanceFailed
    | InstanceWaiting
    | InstanceReported
    | InstanceDegraded
    | ChunkFinished
    | ChunkFailed
    | EnvironmentAnswered
    | EnvironmentFailed
    | RequestsAborted
    | RolloutPaused
    | RolloutResumed
)


class Dispatch(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Send the next chunk of a request to an instance."""

    request_id: str
    """The request."""
    instance_id: str
    """The instance."""
    max_tokens: int
    """The most tokens that the chunk may generate."""
    kv_tokens: int
    """The KV that is reserved for the request there, in whole blocks. The part of its prompt that siblings in
    flight hold there was reserved before.
    """
    migrated: bool
    """Whether the request's last chunk ran on another instance."""
    why: str = ""
    """The placer's reason for this instance, in a word, if it gives one."""
    reserved_tokens: int | None = None
    """The tokens of the chunk that KV is reserved for; it may end early then. None if it is for all of
    them.
    """


class Complete(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Hand the response to the user; the request is over."""

    request_id: str
    """The request that is over."""
    finish_reason: FinishReason
    """The reason why it is over."""


class AskEnvironment(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Ask the environment of a request for the answer to its last turn."""

    request_id: str
    """The request, which acts until the answer."""


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a chunk in flight; its result is no longer wanted."""

    request_id: str
    """The request whose chunk is stopped."""
    instance_id: str
    """The instance on which the chunk runs."""
    reason: Literal["request_aborted"] = "request_aborted"
    """The reason."""


class EndChunk(msgspec.Struct, frozen=True, tag=True):
    """End a chunk in flight now; its instance answers with the tokens that it has, one at least.

    An instance that cannot do so lets the chunk go on.
    """

    request_id: str
    """The request whose chunk ends."""
    instance_id: str
    """The instance on which it runs."""
    reason: Literal["instance_leaves", "paused", "goes_on"]
    """The reason."""


Command = Dispatch | Complete | AskEnvironment | Abort | EndChunk
