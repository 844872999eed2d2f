"""The KV blocks of one instance: how many are in use, and whose old content the free ones still hold.

As in vLLM siblings share the full blocks of their prompt, and a free block keeps its content until it is
used again.  Content goes by names, not by a hash of tokens: a request finds its group's prompt, and behind
it its own blocks; a turn of a trajectory finds all of what its trajectory has.  Empty blocks are used before
any that hold content (vLLM keeps strict order of release).
"""

from __future__ import annotations

from collections import OrderedDict

__all__ = ["BlockPool", "Prompt"]

Prompt = tuple[str, int]
"""A group's id, and the full blocks of its prompt that siblings share."""


class BlockPool:
    """``capacity`` blocks, of which ``free`` may be taken, the longest unused content first.

    A request that is admitted has all of its prompt's shared blocks, or will compute those that are missing
    before any of its siblings is admitted.
    """

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.free = capacity
        self._empty = capacity
        self._kept: OrderedDict[str | Prompt, int] = OrderedDict()  # free blocks, by request or prompt
        self._users: dict[Prompt, int] = {}  # requests that have a whole prompt, while there are any

    @property
    def usage(self) -> float:
        """Fraction of the blocks in use."""
        return 1.0 - self.free / self.capacity

    def take(self, count: int) -> None:
        """Use ``count`` free blocks: empty ones, then the oldest content, from its end."""
        assert count <= self.free, f"{count} KV blocks wanted, {self.free} free"
        self.free -= count
        empty = self._empty - count
        kept = self._kept
        while empty < 0:
            oldest = next(iter(kept))
            empty += kept[oldest]
            if empty <= 0:
                del kept[oldest]
            else:
                kept[oldest], empty = empty, 0
        self._empty = empty

    def found(self, request_id: str, prompt: Prompt, reusable: int) -> int:
        """Return how many of the first ``reusable`` blocks of a request are computed here."""
        whole = prompt[1]
        there = whole if prompt in self._users else self._kept.get(prompt, 0)
        if there < whole:
            return there
        return whole + min(self._kept.get(request_id, 0), reusable - whole)

    def missing(self, prompt: Prompt, needed: int) -> int:
        """Return how many free blocks a request takes that needs ``needed`` in all."""
        return needed - prompt[1] if prompt in self._users else needed

    def admit(self, request_id: str, prompt: Prompt, needed: int, reusable: int) -> int:
        """Use ``needed`` blocks for a request; return how many of the first ``reusable`` are computed."""
        found = self.found(request_id, prompt, reusable)
        kept = self._kept.pop(request_id, 0)
        again = found
        if prompt in self._users:
            again -= prompt[1]
        else:
            kept += self._kept.pop(prompt, 0)
        self.free -= again
        self._empty += kept - again
        self.take(needed - found)
        if found >= prompt[1]:
            self.share(prompt)
        return found

    def share(self, prompt: Prompt) -> None:
        """Let siblings share the blocks of a prompt that one more request has, all computed now."""
        if prompt[1]:
            self._users[prompt] = self._users.get(prompt, 0) + 1

    def release(self, request_id: str, prompt: Prompt, held: int, computed: int) -> None:
        """Free the ``held`` blocks of a request; the first ``computed`` keep their content."""
        whole = prompt[1]
        shared = min(computed, whole)  # less than all: then no other run shares them yet
        self.free += held - shared
        self._empty += held - computed
        if computed > shared:
            self._empty += self._kept.pop(request_id, 0)  # of another turn of its trajectory at that time
            self._kept[request_id] = computed - shared
        if shared == whole and whole:
            self._users[prompt] -= 1
            if self._users[prompt]:
                return
            del self._users[prompt]
        if shared:
            # After the blocks behind it, which are of no use without it.
            self._kept[prompt] = shared
            self.free += shared
