"""Who knows what of a group's text: what an instance lacks of what siblings wrote on others."""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.arrays import Tokens
from seer_core.drafting import SiblingText

__all__ = ["SharedText"]


class SharedText:
    """The responses of one group as far as they are written, and how much of each every instance knows.

    An instance knows what it was given with a chunk, what it wrote itself, and what it was told here; so it
    is told each token at most once.
    """

    def __init__(self, rollout_id: str, group_id: str) -> None:
        self._rollout_id = rollout_id
        self._group_id = group_id
        self._texts: dict[str, Sequence[int]] = {}
        self._known: dict[str, dict[str, int]] = {}

    def know(self, instance_id: str, request_id: str, token_ids: Sequence[int]) -> None:
        """Take in a response as it is now; this instance was given it, or has written it."""
        self._texts[request_id] = token_ids
        self._known.setdefault(instance_id, {})[request_id] = len(token_ids)

    def tell(self, instance_id: str) -> list[SiblingText]:
        """Return what an instance lacks, which it knows from now on."""
        known = self._known.setdefault(instance_id, {})
        told = []
        for request_id, token_ids in self._texts.items():
            start = known.get(request_id, 0)
            if start < len(token_ids):
                rest = Tokens(token_ids[start:])
                told.append(SiblingText(self._rollout_id, self._group_id, request_id, start, rest))
                known[request_id] = len(token_ids)
        return told

    def lost(self, instance_id: str) -> None:
        """Note that an instance knows nothing any more."""
        self._known.pop(instance_id, None)
