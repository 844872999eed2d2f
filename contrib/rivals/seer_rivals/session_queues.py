"""Queues of responses that stay on the instance where they began, one for each instance."""

from __future__ import annotations

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Any

from seer_core.model import InstanceStatus, Request
from seer_core.ports.policy import Placement, Placer, Prioritizer

__all__ = ["RESERVED_TOKENS", "Key", "SessionQueues", "reserved_tokens"]

RESERVED_TOKENS = 256
"""KV that is reserved for what a turn will write; it takes more if there is more.  Assumed."""

NOWHERE = ""
"""The queue of responses without a home."""

Key = tuple[Any, ...]


def reserved_tokens(request: Request) -> int:
    """Return for how many tokens of a response's next turn KV is reserved."""
    return min(RESERVED_TOKENS, request.remaining_tokens)


class SessionQueues(Prioritizer, Placer):
    """Prioritizer and placer in one: a response waits for its home, or for any instance if it has none.

    ``order`` and ``held_kv_tokens`` are what a policy adds.  A turn is sent as one chunk, and an instance
    that ``ends_early`` ends it early where its KV runs short.  A decision costs O(n) over n instances.
    """

    def __init__(self) -> None:
        self._queues: dict[str, list[tuple[Key, int, Request]]] = {NOWHERE: []}
        self._keys: dict[int, tuple[str, Key]] = {}
        self._living: dict[str, InstanceStatus] = {}

    # A policy's own.

    def home_of(self, request: Request) -> str | None:
        """Return the instance for which a response waits, or None for any."""
        return request.instance

    def order(self, request: Request) -> Key:
        """Return the place of a response among those that wait, the least first."""
        raise NotImplementedError

    def held_kv_tokens(self, instance: InstanceStatus, request: Request) -> int:
        """Return the KV there that others hold against a response, beside what runs."""
        raise NotImplementedError

    def placed(self, request: Request, instance: InstanceStatus) -> None:
        """Note that a turn of a response is sent to an instance."""
        raise NotImplementedError

    # The prioritizer.

    def push(self, request: Request) -> None:
        """Queue a response for its home, or for any instance."""
        home = self.home_of(request)
        name = home if home in self._living else NOWHERE
        assert name is not None
        key = self.order(request)
        self._keys[request.seq] = name, key
        heappush(self._queues[name], (key, request.seq, request))

    def peek(self) -> Request | None:
        """Return the first response that has room where it waits, or else the first one."""
        heads = sorted(self._heads())
        for _, _, request in heads:
            if self._target(request) is not None:
                return request
        return heads[0][2] if heads else None

    def take(self, request: Request) -> None:
        """Remove a response; one in the middle of a heap is skipped when it comes up."""
        del self._keys[request.seq]

    def __len__(self) -> int:
        return len(self._keys)

    def _heads(self) -> Iterator[tuple[Key, int, Request]]:
        for name, queue in self._queues.items():
            while queue and self._keys.get(queue[0][1]) != (name, queue[0][0]):
                heappop(queue)
            if queue:
                yield queue[0]

    # The placer.

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Open a queue for a new instance."""
        self._living[instance.id] = instance
        self._queues.setdefault(instance.id, [])

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Let what waits for the instance go anywhere."""
        self._living.pop(instance.id, None)
        for key, seq, request in self._queues.pop(instance.id, ()):
            if self._keys.get(seq) == (instance.id, key):
                self._keys[seq] = NOWHERE, key
                self._queues[NOWHERE].append((key, seq, request))
        heapify(self._queues[NOWHERE])

    def place(self, request: Request, chunk_tokens: int, instances: Any) -> Placement | None:
        """Return the response's home, or the instance with the most room, or None while there is none."""
        target = self._target(request)
        if target is None:
            return None
        why = "home" if target.id == request.instance else "new"
        self.placed(request, target)
        return Placement(target, why, min(chunk_tokens, RESERVED_TOKENS))

    def _target(self, request: Request) -> InstanceStatus | None:
        home = self._living.get(self.home_of(request) or NOWHERE)
        if home is not None:
            return home if self._room(home, request) >= 0 else None
        roomy = max(
            self._living.values(), key=lambda each: (self._room(each, request), -each.seq), default=None
        )
        return roomy if roomy is not None and self._room(roomy, request) >= 0 else None

    def _room(self, instance: InstanceStatus, request: Request) -> int:
        """Return the KV tokens that are left with the response there.

        An idle instance where nothing is held has room for any.
        """
        held = self.held_kv_tokens(instance, request)
        if not instance.running and not held:
            return instance.info.kv_capacity_tokens
        if instance.free_slots <= 0:
            return -1
        return instance.free_kv_tokens - held - instance.footprint(request, reserved_tokens(request))
