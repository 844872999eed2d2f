"""The messages between Seer's runtime and a server that runs already, over routes of the server's own.

The server has Seer's package for its engine.  ``INFO`` returns a ``ServedInfo``; ``CALL`` takes a
``ServedCall``, in whose order it is obeyed, and returns a ``ServedAnswer``.  Chunks are requests like any
other client's; which response they are of stands under ``JOB`` among their further arguments.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from seer_core.model.arrays import Tokens
from seer_core.ports.drafting import SiblingTokens, SourceSpec
from seer_core.ports.engine import ChunkJob
from seer_core.ports.kv import LOOPBACK, StoreSpec
from seer_worker.wire import Degraded, ForgetGroup, PoolMessage

__all__ = [
    "CALL",
    "ENDS_EARLY",
    "INFO",
    "JOB",
    "LEASE_S",
    "AddText",
    "Attach",
    "Detach",
    "ServedAnswer",
    "ServedCall",
    "ServedCost",
    "ServedInfo",
    "ServedJob",
    "ServedKv",
    "ServedParameters",
    "ShareAs",
    "job_argument",
    "read_job",
]

INFO = "/seer/info"
CALL = "/seer/call"
JOB = "seer_job"
ENDS_EARLY = "seer_may_end_early"
"""The further argument of a chunk that may end where KV runs short, in place of being preempted."""
LEASE_S = 120.0
"""A runtime that has not called for so long has ended, and is left."""


class ServedKv(msgspec.Struct, frozen=True):
    """The KV of a server that can share it."""

    block_tokens: int
    token_bytes: int
    kind: str
    """Stands for the layout: only servers of one kind fetch each other's KV."""
    fetch_s_per_token: float = 0.0
    """The time to copy one token's KV out of the engine and into it, measured when the pool was attached."""


class ServedInfo(msgspec.Struct, frozen=True):
    """The things that a server can do for Seer, as it was started."""

    seer: str
    """The version of Seer's packages there."""
    node: str
    """The node that it runs on, as ``InstanceInfo.node`` has it."""
    keyed: bool
    """Whether it samples by key."""
    runner: str
    """Which of its engine's model runners computes the steps."""
    kv: ServedKv | None = None
    kv_lack: str = ""
    """Why it can share no KV, with what it has to be started with; empty if it can."""
    draft_tokens: int = 0
    """The longest draft that it verifies for Seer; 0 if it does not."""
    drafts_lack: str = ""
    """Why it does not, likewise."""
    serves: bool = False
    """Whether it serves a runtime now."""


class Attach(msgspec.Struct, frozen=True, tag=True):
    """Serve this runtime from now on: share KV through a store, draft by a source, or neither.

    An earlier runtime is left; nothing is shared until ``ShareAs``.
    """

    instance_id: str
    address: str = LOOPBACK
    """The address of the server's node, as the runtime reaches it."""
    store: StoreSpec | None = None
    source: SourceSpec | None = None


class Detach(msgspec.Struct, frozen=True, tag=True):
    """Serve no runtime any more; what it had is closed."""


class ShareAs(msgspec.Struct, frozen=True, tag=True):
    """Share KV with servers that have the same ``weights``, a name that no others have.

    It ends when the server's weights change in any way.
    """

    weights: str


class AddText(msgspec.Struct, frozen=True, tag=True):
    """A response has written these tokens on another instance, as ``SiblingTokens`` says."""

    rollout_id: str
    group_id: str
    request_id: str
    start: int
    token_ids: list[int]

    @classmethod
    def of(cls, text: SiblingTokens) -> AddText:
        """Return the message of a text."""
        return cls(text.rollout_id, text.group_id, text.request_id, text.start, text.token_ids.tolist())

    def text(self) -> SiblingTokens:
        """Return the text."""
        return SiblingTokens(
            self.rollout_id, self.group_id, self.request_id, self.start, Tokens(self.token_ids)
        )


class ServedCall(msgspec.Struct, frozen=True):
    """Messages of one runtime, which its ``driver`` stands for."""

    driver: str
    messages: list[Attach | Detach | ShareAs | AddText | ForgetGroup | PoolMessage]


class ServedAnswer(msgspec.Struct, frozen=True):
    """The answer to a call; ``rejection`` is None if all was done."""

    rejection: str | None = None
    kv: ServedKv | None = None
    """The server's KV, measured; None unless a store is attached."""
    shares: bool = False
    """Whether KV is shared now."""
    notes: list[PoolMessage | Degraded] = []
    """What store and source have to report."""
    drafting_s: float = 0.0
    """The seconds spent on drafts."""
    drafting: dict[str, float] = {}
    """The source's figures."""


class ServedJob(msgspec.Struct, frozen=True):
    """Which response a chunk is of, as ``ChunkJob`` has it."""

    response: str
    group: str
    prompt_tokens: int
    rollout: str = ""
    probe: bool = False
    last: bool = False
    turns: bool = False
    trajectory: str = ""


class ServedCost(msgspec.Struct, frozen=True):
    """The cost of a chunk, as ``ChunkOutput`` has it; a server whose KV connector is Seer's returns it."""

    pool_tokens: int = 0
    steps: int = 0
    drafted_at: list[int] = []
    accepted_at: list[int] = []


class ServedParameters(msgspec.Struct, frozen=True):
    """The part of an answer that a KV connector fills."""

    seer: ServedCost | None = None


def job_argument(job: ChunkJob) -> str:
    """Return a chunk's ``ServedJob`` as text, for ``JOB``."""
    found = ServedJob(
        job.request_id,
        job.group_id,
        job.prompt_tokens,
        job.rollout_id,
        job.probe,
        job.last,
        job.turns,
        job.trajectory,
    )
    return msgspec.json.encode(found).decode()


def read_job(arguments: Mapping[str, Any] | None) -> ServedJob | None:
    """Return which response a request is of; None if it is another client's."""
    text = (arguments or {}).get(JOB)
    if not isinstance(text, str):
        return None
    try:
        return msgspec.json.decode(text, type=ServedJob)
    except (msgspec.DecodeError, UnicodeError, RecursionError):
        return None
