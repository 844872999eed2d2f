"""The contract of the journal, which keeps a rollout's responses so that another process goes on with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from seer_host.images import PlacedImages

from seer_core.model import ChunkRecord, PromptGroup, TurnRecord, WrittenResponse
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs

__all__ = ["Journal"]


class Journal(Protocol):
    """Keeps what a rollout writes: its groups, their chunks, the answers of environments, and aborts.

    The other ends follow from the chunks and the answers.

    None of its methods waits but ``synced``, and none raises but ``begin``.  A journal that cannot write any
    more logs that once, and the rollout goes on without it.
    """

    def begin(
        self,
        groups: Sequence[PromptGroup],
        version: int,
        fingerprints: Mapping[str, str],
        end_token_ids: Sequence[int] = (),
    ) -> Sequence[Sequence[WrittenResponse]]:
        """Take in groups; return for each what an earlier process has written: all responses, or none.

        Tokens depend on the group, on the weights, whose version and fingerprints these are, and on the
        tokens that end a response, of which there are none where they are not known.

        Raises:
            InputError: a group or its weights are not those of the journal's group of this id; none is taken.
        """
        ...

    def chunk(
        self,
        request_id: str,
        start: int,
        token_ids: Tokens,
        logprobs: Logprobs,
        stopped: bool,
        record: ChunkRecord,
        top_logprobs: TopLogprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """Keep a chunk of a response, whose tokens from ``start`` on these are; they do not change.

        ``top_logprobs`` are the most probable tokens at their places, where the prompt asks for them, and
        ``prompt_logprobs`` its own log-probs, which come with the first chunk.
        """
        ...

    def answered(
        self,
        request_id: str,
        start: int,
        token_ids: Tokens,
        turn: TurnRecord,
        done: bool,
        images: PlacedImages | None = None,
    ) -> None:
        """Keep what a response's environment answered, whose tokens from ``start`` on these are.

        ``turn`` is the turn with this answer; ``done``: the response is over with it.  ``images`` are those
        of the answer; their places count from the prompt's first token.
        """
        ...

    def aborted(self, request_id: str) -> None:
        """Keep that the user aborted a response."""
        ...

    async def synced(self) -> None:
        """Wait until what was given so far is as safe as the journal makes it, or the journal has failed."""
        ...
