"""Tail isolation: the longest responses apart on instances with few requests, the rest packed on the others.

After TailSieve (Alibaba Qwen, 2026): the rollout is over earliest if its extreme tail decodes at a small
batch from the start.  There whole responses are bound to instances, and candidates come from the last round;
here chunks move, and the candidates are chosen anew whenever one of them is over.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins.config_types import Share
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Placer
from seer_rivals.expected_lengths import EarlierLengths, Remaining, read_lengths, true_remaining
from seer_rivals.longest_remaining import LongestRemaining

__all__ = ["Settings", "TailIsolation"]

TIER = "experimental"

APART = 0.05
"""A request moves only if the other instance has so much more of its KV free, or its own has no room."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.tail_isolation]``: how many instances are kept for the tail, and whose lengths are known."""

    instances: Annotated[int, Meta(ge=1)] = 1
    """The instances that are kept for the requests with the most left."""
    share: Share = 0.5
    """The part of their KV that these requests may fill."""
    lengths: str = ""
    """A JSON file with the lengths of the last epoch's responses, a list for each group's id, relative to
    the config file. Without one they come with the prompts, as in ``seer sim``.
    """
    known: Literal["responses", "groups"] = "responses"
    """Lengths that come with the prompts are those of these ``responses``, or of earlier responses of their
    ``groups``.
    """


class TailIsolation(LongestRemaining, Placer):
    """Prioritizer and placer in one: the most left first, and the tail on instances of its own.

    The tail is the requests with the most left whose contexts will, at their ends, fill the ``share`` of the
    KV of the first ``instances`` instances.  A chunk goes where it fits whole.  When no other request waits,
    all instances take any.
    """

    def __init__(self, remaining: Remaining, instances: int, share: float) -> None:
        super().__init__(remaining)
        self._expected = remaining
        self._share = share
        self._count = instances
        self._living: dict[str, InstanceStatus] = {}
        self._unfinished: dict[int, Request] = {}
        self._tail: set[int] = set()
        self._planned = False

    def push(self, request: Request) -> None:
        """Queue a request; a new one may belong to the tail."""
        super().push(request)
        if request.seq not in self._unfinished:
            self._unfinished[request.seq] = request
            self._planned = False

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Forget a response that is over; if it was in the tail, others take its place."""
        self._unfinished.pop(request.seq, None)
        if request.seq in self._tail:
            self._planned = False

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Plan anew if the instance is new."""
        if self._living.get(instance.id) is not instance:
            self._living[instance.id] = instance
            self._planned = False

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Plan anew without the instance."""
        self._living.pop(instance.id, None)
        self._planned = False

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return an instance of the request's kind that has room for the chunk, or None."""
        ordered = sorted(instances, key=lambda each: each.seq)
        if len(self) <= 1:
            return self._emptiest(request, chunk_tokens, ordered)
        count = min(self._count, len(ordered) - 1)
        apart, others = ordered[:count], ordered[count:]
        if not self._planned:
            self._plan(apart)
        if request.seq in self._tail:
            found = self._emptiest(request, chunk_tokens, apart, self._share)
            if found is not None:
                return found
        return self._emptiest(request, chunk_tokens, others)

    def _plan(self, apart: Iterable[InstanceStatus]) -> None:
        """Choose the tail."""
        self._planned = True
        self._tail = set()
        room = self._share * sum(each.info.kv_capacity_tokens for each in apart)
        ranked = sorted((-self._expected(each), each.seq, each) for each in self._unfinished.values())
        for negative_left, seq, request in ranked:
            room -= request.context_tokens - negative_left
            if room < 0 and self._tail:
                break
            self._tail.add(seq)

    def _emptiest(
        self, request: Request, chunk_tokens: int, among: Iterable[InstanceStatus], share: float = 1.0
    ) -> InstanceStatus | None:
        """Return the instance that has least reserved and has room, or the request's own if it is close."""
        fits = [each for each in among if _fits(each, request, chunk_tokens, share)]
        if not fits:
            return None
        least = min(fits, key=lambda each: (each.reserved_kv_tokens, each.seq))
        for each in fits:
            more = each.reserved_kv_tokens - least.reserved_kv_tokens
            if each.id == request.instance and more <= APART * each.info.kv_capacity_tokens:
                return each
        return least


def _fits(instance: InstanceStatus, request: Request, chunk_tokens: int, share: float) -> bool:
    """Return whether an instance has a slot and KV, within its share, for a chunk; an idle one has."""
    if not instance.running:
        return True
    needed = instance.reserved_kv_tokens + instance.footprint(request, chunk_tokens)
    return instance.free_slots > 0 and needed <= share * instance.info.kv_capacity_tokens


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> TailIsolation:
    """Serve the longest remaining first, and keep instances for them."""
    remaining: Remaining = true_remaining
    if settings.lengths:
        remaining = EarlierLengths(read_lengths(startup.path(settings.lengths))).remaining
    elif settings.known == "groups":
        remaining = EarlierLengths(None).remaining
    return TailIsolation(remaining, settings.instances, settings.share)


seer_make_placer = seer_make_prioritizer  # one object fills both slots
