"""How much a request has left to generate, by lengths from the last epoch or by true ones."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping
from itertools import accumulate
from pathlib import Path
from weakref import WeakKeyDictionary

from seer_host.json_files import JsonFormat

from seer_core.errors import ConfigError, PromptError
from seer_core.model import GroupContext, Request

__all__ = ["EarlierLengths", "Remaining", "read_lengths", "true_remaining"]

Remaining = Callable[[Request], float]
"""Returns the tokens that a request is expected to have left."""

_LENGTHS = JsonFormat[dict[str, tuple[int, ...]]](
    dict[str, tuple[int, ...]],
    "no file of lengths",
    'write {"GROUP": [TOKENS, ...], ...} with the lengths of each group\'s responses in the last epoch',
    ConfigError,
)


def read_lengths(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the lengths of earlier responses by group.

    Raises:
        ConfigError: the file cannot be read, or holds something else.
    """
    return _LENGTHS.read(path)


def true_remaining(request: Request) -> int:
    """Return what a request has left by its true length.

    Raises:
        PromptError: its group's lengths are not known.
    """
    lengths = request.group.known_lengths
    if lengths is None or request.index >= len(lengths):
        raise PromptError(
            f"the lengths of group {request.group.id!r} are not known; name a file of lengths in the settings"
            " of `history` or `tail_isolation`, or use a policy of `seer sim` that has them"
        )
    return max(0, lengths[request.index] - request.generated_tokens)


class EarlierLengths:
    """Estimates by the lengths of the last epoch's responses to the same prompt.

    A request with t tokens is expected to be as long as those of them that were longer than t, on average.
    If none was, or nothing is known of its group, it may still reach its limit.  ``by_group`` has lengths by
    the group's id; without it they are the group's ``known_lengths``.
    """

    def __init__(self, by_group: Mapping[str, tuple[int, ...]] | None) -> None:
        self._by_group = by_group
        self._sums: WeakKeyDictionary[GroupContext, tuple[list[int], list[int]]] = WeakKeyDictionary()

    def remaining(self, request: Request) -> float:
        """Return the tokens that a request is expected to have left.

        Raises:
            PromptError: there are no lengths of any group.
        """
        lengths, sums = self._of(request)
        longer = bisect_right(lengths, request.generated_tokens)
        if longer == len(lengths):
            return request.remaining_tokens
        mean = (sums[-1] - sums[longer]) / (len(lengths) - longer)
        return min(request.group.max_tokens, mean) - request.generated_tokens

    def _of(self, request: Request) -> tuple[list[int], list[int]]:
        """Return a group's lengths, the shortest first, and the sums of the first 0, 1, ... of them."""
        found = self._sums.get(request.group)
        if found is None:
            if self._by_group is None:
                true_remaining(request)  # refuses a group without lengths
                lengths = sorted(request.group.known_lengths or ())
            else:
                lengths = sorted(self._by_group.get(request.group.id, ()))
            found = self._sums[request.group] = lengths, [0, *accumulate(lengths)]
        return found
