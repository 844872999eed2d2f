"""Events of a rollout, and the commands with which the scheduler answers them.

``msgspec.Struct`` instead of attrs: the trace needs tagged unions, and one costs 0.1 us to make.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from seer_core.model.requests import FinishReason, InstanceInfo, Sampling

__all__ = [
    "Abort",
    "ChunkFailed",
    "ChunkFinished",
    "Command",
    "Complete",
    "Dispatch",
    "Event",
    "GroupSpec",
    "GroupsSubmitted",
    "InstanceDegraded",
    "InstanceFailed",
    "InstanceLost",
    "InstanceReported",
    "InstanceStarted",
    "InstanceStopped",
    "RequestsAborted",
    "ResumedResponse",
]


class ResumedResponse(msgspec.Struct, frozen=True, omit_defaults=True):
    """A response that an earlier process began: its tokens so far, and why it is over if it is."""

    tokens: int
    finish_reason: FinishReason | None = None


class GroupSpec(msgspec.Struct, frozen=True, omit_defaults=True):
    """A prompt group without its tokens: all that scheduling needs, and what the trace keeps.

    ``resumed``: its responses as an earlier process left them; empty for none.
    """

    id: str
    prompt_tokens: int
    n: int
    max_tokens: int
    known_lengths: tuple[int, ...] | None = None
    sampling: Sampling = Sampling()
    labels: dict[str, str] = {}
    resumed: tuple[ResumedResponse, ...] = ()


class GroupsSubmitted(msgspec.Struct, frozen=True, tag=True):
    """New prompt groups, in order of arrival; all of one event are known before any of them runs."""

    groups: tuple[GroupSpec, ...]


class InstanceStarted(msgspec.Struct, frozen=True, tag=True):
    """An instance is ready for chunks, for the first time or again."""

    info: InstanceInfo


class InstanceLost(msgspec.Struct, frozen=True, tag=True):
    """An instance is gone, and every unfinished chunk on it with it."""

    instance_id: str
    reason: str


class InstanceFailed(msgspec.Struct, frozen=True, tag=True):
    """A lost instance is not started again: it was lost too often, or its restarts failed."""

    instance_id: str
    reason: str


class InstanceStopped(msgspec.Struct, frozen=True, tag=True):
    """An instance was ended on purpose; unfinished chunks on it are void, and it may start again."""

    instance_id: str


class InstanceReported(msgspec.Struct, frozen=True, gc=False, tag=True):
    """An engine's own telemetry; ``kv_usage`` is a fraction of its KV blocks in use.

    ``stepping_s`` and ``drafting_s`` are the seconds since the instance's start that it has spent in
    steps, and within them on drafts; ``drafting`` holds figures of its draft source, by name.  An engine that
    emulates an accelerator in real time reports how long its steps should have taken, ``emulated_s``, and how
    much longer they have, ``overrun_s``, both in emulated seconds.
    """

    instance_id: str
    running: int
    waiting: int
    kv_usage: float
    stepping_s: float = 0.0
    drafting_s: float = 0.0
    drafting: dict[str, float] = {}
    emulated_s: float = 0.0
    overrun_s: float = 0.0


class InstanceDegraded(msgspec.Struct, frozen=True, tag=True):
    """A part of an instance fails, and the instance works on without it; may come before its start.

    ``what`` is the part: ``drafting``, ``kv_pool``, or ``pace`` where what emulates an accelerator falls
    behind it, so that times are not valid; ``log`` the file in which its process says more.
    """

    instance_id: str
    what: str
    reason: str
    log: str | None = None


class ChunkFinished(msgspec.Struct, frozen=True, gc=False, tag=True):
    """A chunk came to its end with ``tokens`` new tokens.

    ``stopped``: the model ended the response (EOS or a stop token); otherwise the chunk's length did.
    ``steps`` engine steps gave it tokens; they verified ``drafted`` draft tokens and accepted
    ``accepted`` of them.  The KV of its context was cached, came from the pool, or was prefilled.
    """

    request_id: str
    instance_id: str
    tokens: int
    stopped: bool
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    cached_tokens: int = 0
    pool_tokens: int = 0
    prefilled_tokens: int = 0


class ChunkFailed(msgspec.Struct, frozen=True, tag=True):
    """A living instance gave a chunk back without a result; its tokens, if any, are discarded."""

    request_id: str
    instance_id: str
    reason: str


class RequestsAborted(msgspec.Struct, frozen=True, tag=True):
    """The user no longer wants these requests; none of them runs in another's place."""

    request_ids: tuple[str, ...]


Event = (
    GroupsSubmitted
    | InstanceStarted
    | InstanceStopped
    | InstanceLost
    | InstanceFailed
    | InstanceReported
    | InstanceDegraded
    | ChunkFinished
    | ChunkFailed
    | RequestsAborted
)


class Dispatch(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Send the next chunk of a request to an instance.

    ``kv_tokens`` is its whole footprint there; of the prompt in it, what siblings in flight there hold was
    reserved before.  ``why`` is the placer's reason for this instance, in a word, if it gives one.
    """

    request_id: str
    instance_id: str
    max_tokens: int
    kv_tokens: int
    migrated: bool
    why: str = ""


class Complete(msgspec.Struct, frozen=True, gc=False, tag=True):
    """Hand the response to the user; the request is over."""

    request_id: str
    finish_reason: FinishReason


class Abort(msgspec.Struct, frozen=True, tag=True):
    """Stop a chunk in flight; its result is no longer wanted."""

    request_id: str
    instance_id: str
    reason: Literal["request_aborted"] = "request_aborted"


Command = Dispatch | Complete | Abort
