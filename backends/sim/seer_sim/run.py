"""One chunk on one instance, and what has become of it so far."""

from __future__ import annotations

from itertools import accumulate, dropwhile
from operator import not_
from typing import TYPE_CHECKING

import msgspec

from seer_core.ports.engine import ChunkJob
from seer_sim.kv import Prompt

if TYPE_CHECKING:
    from seer_sim.decode_cohort import DecodeCohort

__all__ = ["SimChunk"]


class SimChunk:
    """A chunk that waits, computes its context (``cohort`` is None) or decodes in a ``DecodeCohort``.

    ``tokens`` and ``computed`` stand still while it decodes.  ``fills`` counts the steps that finished its
    context and gave a token, ``verified[g]`` the decoding steps with g draft tokens.  ``fetched_blocks``
    were brought from the KV pool, which was ``sought`` for them, and ``pool_tokens`` found there alone.
    ``response_tokens`` is how long the response will be.  Its KV is kept as ``kv_name``.
    """

    __slots__ = (
        "cached",
        "cohort",
        "computed",
        "end",
        "fetched_blocks",
        "fills",
        "final_tokens",
        "job",
        "joined",
        "kv_name",
        "new_tokens",
        "offset",
        "phase",
        "pool_tokens",
        "preemptions",
        "prompt",
        "response_tokens",
        "sought",
        "stopped",
        "tokens",
        "verified",
        "verified_before",
        "work",
    )

    def __init__(
        self, job: ChunkJob, tokens: int, new_tokens: int, stopped: bool, response_tokens: int = 0
    ) -> None:
        self.job = job
        self.kv_name = job.trajectory or job.request_id
        self.new_tokens = new_tokens
        self.stopped = stopped
        self.response_tokens = response_tokens or tokens - job.context_tokens + new_tokens
        self.tokens = tokens
        self.final_tokens = tokens + new_tokens
        self.prompt: Prompt = ("", 0)
        self.computed = 0
        self.cached = 0
        self.sought = False
        self.fetched_blocks = 0
        self.pool_tokens = 0
        self.work = 0
        self.preemptions = 0
        self.fills = 0
        self.verified: list[int] = []
        # Its cohort's, while it is in one.
        self.cohort: DecodeCohort | None = None
        self.joined = 0
        self.end = 0
        self.phase = 0
        self.offset = 0
        self.verified_before: list[int] = []

    def end_early(self) -> None:
        """End the chunk with the tokens that it has."""
        self.new_tokens -= self.final_tokens - self.tokens
        self.final_tokens = self.tokens
        self.stopped = False
        self.job = msgspec.structs.replace(self.job, last=False)

    @property
    def middle(self) -> int:
        """Tokens of the response that are written in the middle of the chunk."""
        return self.final_tokens - self.new_tokens // 2 - self.job.context_tokens

    @property
    def steps(self) -> int:
        """Steps that have given it a token."""
        return self.fills + sum(self.verified)

    @property
    def drafted_at(self) -> list[int]:
        """Steps that have verified at least 1, 2, ... draft tokens for it."""
        at_least = dropwhile(not_, accumulate(reversed(self.verified[1:])))
        return [*at_least][::-1]
