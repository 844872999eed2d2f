"""The tokens of a group that each instance lacks, because siblings wrote them on other instances."""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.model.arrays import Tokens
from seer_core.ports.drafting import SiblingTokens

__all__ = ["SiblingLog"]


class SiblingLog:
    """The responses of one group as far as they are written, and how much of each every instance has.

    An instance has the tokens that it was given with a chunk, that it wrote itself, and that it was sent from
    here; so it is sent each token at most once.  Responses with new tokens are noted as they are written, so
    that sending costs as much as there is to send, and not a look at every response.
    """

    def __init__(self, rollout_id: str, group_id: str) -> None:
        self._rollout_id = rollout_id
        self._group_id = group_id
        self._texts: dict[str, Sequence[int]] = {}
        self._known: dict[str, dict[str, int]] = {}
        self._news: dict[str, dict[str, None]] = {}
        """Requests that have written since an instance was sent tokens; for one that never was, all have."""

    def resume(self, request_id: str, token_ids: Sequence[int]) -> None:
        """Take in a response that an earlier process has written, so that no instance has it."""
        self._texts[request_id] = token_ids

    def record(self, instance_id: str, request_id: str, token_ids: Sequence[int]) -> None:
        """Take in a response as it is now; this instance was given it, or has written it."""
        self._texts[request_id] = token_ids
        self._known.setdefault(instance_id, {})[request_id] = len(token_ids)
        for other, news in self._news.items():
            if other != instance_id:
                news[request_id] = None

    def take_pending(self, instance_id: str) -> list[SiblingTokens]:
        """Return the tokens that an instance lacks, which count as sent from now on."""
        known = self._known.setdefault(instance_id, {})
        pending = []
        for request_id in self._news.get(instance_id, self._texts):
            token_ids, start = self._texts[request_id], known.get(request_id, 0)
            if start < len(token_ids):
                rest = Tokens(token_ids[start:])
                pending.append(SiblingTokens(self._rollout_id, self._group_id, request_id, start, rest))
                known[request_id] = len(token_ids)
        self._news[instance_id] = {}
        return pending

    def lost(self, instance_id: str) -> None:
        """Note that an instance has lost all tokens."""
        self._known.pop(instance_id, None)
        self._news.pop(instance_id, None)
