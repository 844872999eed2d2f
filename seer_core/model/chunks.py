"""A chunk as an engine gets it, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_core.model.sampling import Sampling

__all__ = ["ChunkJob", "ChunkOutput", "ChunkPiece"]


class ChunkJob(msgspec.Struct, frozen=True, gc=False):
    """One chunk, complete: an engine needs nothing else and remembers nothing between chunks.

    ``token_ids`` is the prompt followed by everything generated so far.  ``seed`` is the request's:
    the noise behind the token at absolute position p depends on (seed, p) and on nothing else.
    ``known_tokens`` is the response's true length where it is known (simulated engines).  ``probe``: the
    group's first response, for whose length the scheduler waits; ``siblings_finished`` counts the
    responses of its group that were over when the chunk was sent.  ``last``: the response ends with this
    chunk at the latest.  ``rollout_id`` is another for each rollout anywhere, while ids of groups and
    requests may come again; what is kept between chunks beside the engine goes by it.  ``streams``: the
    response is read while it is written; an engine that can reports the running chunk in ``ChunkPiece``s.
    ``may_end_early``: an instance whose KV runs short may answer with the tokens that the chunk has, one at
    least, instead of preempting it.
    """

    id: str
    """The chunk's own id."""
    request_id: str
    """The request, as ``GROUP/INDEX``."""
    group_id: str
    """The group that it is of."""
    token_ids: list[int]
    prompt_tokens: int
    """How many of ``token_ids`` are the group's prompt."""
    max_tokens: int
    """The most tokens that the chunk may generate."""
    sampling: Sampling
    """How tokens are drawn."""
    seed: int
    weight_version: int
    """The version of the weights that it is for."""
    known_tokens: int | None = None
    probe: bool = False
    siblings_finished: int = 0
    last: bool = False
    rollout_id: str = ""
    streams: bool = False
    may_end_early: bool = False
    turns: bool = False
    """Whether the response may go on where the chunk stops, behind an environment's answer."""
    turn_start: int = 0
    """Where among ``token_ids`` the turn begins that the chunk goes on with; 0 if it is the first turn."""
    trajectory: str = ""
    """The trajectory of which the response is one turn; empty for none. A KV pool keeps its KV, also once the
    response is over, until the engine's ``forget_group`` of it.
    """
    attachments: Mapping[str, Any] = {}
    """The prompt's own fields for the engine, which nothing else reads."""
    whole: bool = False
    """Whether the response is not divided: the engine cannot go on with it, so it may not end it early."""

    @property
    def context_tokens(self) -> int:
        """The tokens before the turn: to controls of sampling and to stop strings they are the prompt."""
        return self.turn_start or self.prompt_tokens


class ChunkOutput(msgspec.Struct, frozen=True, gc=False):
    """The result of a chunk.  ``token_ids`` and ``logprobs`` hold the new tokens, in order; lists will do.

    ``stopped``: the model ended the response.  The token with which it did, the end token or another that
    the model's configuration names, is the last of ``token_ids``, with its log-prob, and counts in the
    response's length; an engine that is not given that token may leave it out.  ``cached_tokens`` of the
    job's tokens were found in the instance's cache, ``pool_tokens`` in the KV pool; ``prefilled_tokens`` were
    computed before the first new token.
    ``computed_tokens`` counts every position run through the model for this chunk, with what
    preemptions made it repeat, but without drafts that were rejected.  ``steps`` is the number of engine
    steps that gave it tokens; ``drafted_at[j]`` counts those that verified at least j + 1 draft tokens, and
    ``accepted_at[j]`` those that accepted as many.
    """

    job_id: str
    """The chunk's id."""
    token_ids: Tokens
    logprobs: Logprobs
    stopped: bool
    cached_tokens: int
    prefilled_tokens: int
    computed_tokens: int
    preemptions: int
    """How often the engine preempted it."""
    weight_version: int
    """The version of the weights that wrote it."""
    steps: int = 0
    drafted_at: list[int] = []
    accepted_at: list[int] = []
    pool_tokens: int = 0
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens at the place of each new token, where the sampling asks for them."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probs of the prompt, from a request's first chunk, where the sampling asks for them."""
    attachments: dict[str, Any] = {}
    """What the engine has answered beside that, for the user."""


class ChunkPiece(msgspec.Struct, frozen=True, gc=False):
    """The tokens of a running chunk since its last piece; ``start`` new tokens of the chunk came before.

    They are those that ``ChunkOutput`` will have at those places, so no log-prob is infinite or not a number.
    """

    job_id: str
    """The chunk's id."""
    start: int
    token_ids: Tokens
    """The tokens."""
    logprobs: Logprobs
    """The log-prob of each, in nats."""
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens at the place of each, where the sampling asks for them."""
