"""StreamRL with perfect lengths: long groups apart from the others, fewer at a time, longest first.

After "StreamRL" (arXiv 2504.15930, skewness-aware dispatching and scheduling), whose length predictor is
replaced by the truth.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from heapq import heappop, heappush

import attrs
from msgspec import Struct

from seer_core.errors import PromptError
from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins.config_types import Share
from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.policy import Placer, Prioritizer

__all__ = ["Settings", "StreamRLOracle"]

TIER = "supported"


class Settings(Struct, frozen=True):
    """``[plugin.streamrl_oracle]``: how groups are parted.

    The default is assumed: neither paper says how many buckets there are, or where they part.
    """

    long_share: Share = 0.3
    """The share of the groups, those with the longest responses, that has instances of its own."""


@attrs.define(eq=False)
class _BoundGroup:
    """A group that is not over: its requests that wait, and the instance it is bound to."""

    context: GroupContext
    longest_tokens: int
    steps: int  # that its responses take, in all
    area: float  # KV tokens times steps that they occupy, in all
    waiting: deque[Request] = attrs.Factory(deque)
    home: InstanceStatus | None = None


@attrs.define(eq=False)
class _Bucket:
    """Groups of like length, which wait for one of the bucket's instances; a heap, longest first."""

    steps: int = 0
    area: float = 0.0
    last_tokens: int = 0  # of the longest response of the group that starts last
    queue: list[tuple[int, int, _BoundGroup]] = attrs.Factory(list)
    instances: list[InstanceStatus] = attrs.Factory(list)

    def time(self, instances: Sequence[InstanceStatus]) -> float:
        """Return the steps that the bucket takes on these: full of KV, and half full while its last ends."""
        room = sum(instance.info.kv_capacity_tokens for instance in instances)
        return self.area / room + self.last_tokens / 2


class StreamRLOracle(Prioritizer, Placer):
    """Prioritizer and placer in one: two buckets of groups, by their longest response.

    Instances are shared out so that both buckets take about as long.  An instance runs as many requests
    at once as it has room for at their mean context, so fewer of the long ones; a group starts as a whole,
    longest first, and stays where it is.
    """

    def __init__(self, long_share: float) -> None:
        self._long_share = long_share
        self._groups: dict[str, _BoundGroup] = {}
        self._buckets: list[_Bucket] = []
        self._living: dict[str, InstanceStatus] = {}
        self._bound: deque[_BoundGroup] = deque()  # those with a home and, perhaps, requests that wait
        self._planned = False
        self._waiting = 0

    # The prioritizer.

    def push(self, request: Request) -> None:
        """Take a waiting request whose group's lengths are known."""
        group = self._groups.get(request.group.id)
        if group is None or group.context is not request.group:
            group = self._groups[request.group.id] = _add_group(request.group)
            self._planned = False
        group.waiting.append(request)
        self._waiting += 1
        if group.home is not None:
            self._bound.append(group)
        elif len(group.waiting) == 1:  # its instance left while all of its requests were in flight
            self._planned = False

    def peek(self) -> Request | None:
        """Return a request of a group that has an instance, or else bind the longest that finds one."""
        if not self._planned:
            self._plan()
        while self._bound and not self._bound[0].waiting:
            self._bound.popleft()
        if not self._bound:
            self._bind()
        return self._bound[0].waiting[0] if self._bound else None

    def take(self, request: Request) -> None:
        """Remove a waiting request."""
        self._groups[request.group.id].waiting.remove(request)
        self._waiting -= 1

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Forget a group that is over."""
        if not group.left:
            self._groups.pop(group.id, None)

    def __len__(self) -> int:
        return self._waiting

    # The placer.

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Plan anew if the instance is new; its load is read when a group is bound."""
        if self._living.get(instance.id) is not instance:
            self._living[instance.id] = instance
            self._planned = False

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Let the instance's groups be bound again."""
        self._living.pop(instance.id, None)
        for group in self._groups.values():
            if group.home is instance:
                group.home = None
        self._planned = False

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the instance of the request's group; one that is served out of its turn gets one now."""
        group = self._groups[request.group.id]
        if group.home is None:
            self._settle(group, instances)
        return group.home

    def _plan(self) -> None:
        """Sort what is not bound into buckets, and share the instances out among them."""
        self._planned = True
        groups = sorted(self._groups.values(), key=lambda group: (-group.longest_tokens, group.context.seq))
        cut = round(len(groups) * self._long_share) if len(self._living) > 1 else 0
        self._buckets = [_fill(part) for part in (groups[:cut], groups[cut:]) if part]
        self._bound = deque(group for group in groups if group.home is not None and group.waiting)
        living = sorted(self._living.values(), key=lambda instance: instance.seq)
        if len(self._buckets) == 2:
            longs, others = self._buckets
            cut = min(
                range(1, len(living)),
                key=lambda count: max(longs.time(living[:count]), others.time(living[count:])),
            )
            longs.instances, others.instances = living[:cut], living[cut:]
        elif self._buckets:
            self._buckets[0].instances = living

    def _bind(self) -> None:
        """Bind the longest group of the first bucket that has room on one of its instances."""
        for bucket in self._buckets:
            while bucket.queue and (bucket.queue[0][2].home or not bucket.queue[0][2].waiting):
                heappop(bucket.queue)
            if not bucket.queue:
                continue
            emptiest = min(bucket.instances, key=lambda instance: (instance.running, instance.seq))
            group = bucket.queue[0][2]
            limit = min(
                emptiest.info.max_running, emptiest.info.kv_capacity_tokens * bucket.steps / bucket.area
            )
            if not emptiest.running or emptiest.running + len(group.waiting) <= limit:
                heappop(bucket.queue)
                self._settle(group, bucket.instances)
                return

    def _settle(self, group: _BoundGroup, instances: Sequence[InstanceStatus]) -> None:
        """Bind a group to the emptiest of these."""
        group.home = min(instances, key=lambda instance: (instance.running, instance.seq))
        self._bound.append(group)


def _add_group(context: GroupContext) -> _BoundGroup:
    lengths = context.known_lengths
    if lengths is None or len(lengths) < context.size:
        raise PromptError(
            f"plug-in 'streamrl_oracle' needs the true lengths of group {context.id!r}, one for each"
            " response; use it with --oracle in `seer sim`, or as its policy streamrl-oracle"
        )
    return _BoundGroup(
        context,
        longest_tokens=max(lengths),
        steps=sum(lengths),
        area=sum(tokens * (context.prompt_tokens + tokens / 2) for tokens in lengths),
    )


def _fill(groups: Iterable[_BoundGroup]) -> _Bucket:
    bucket = _Bucket()
    for group in groups:
        bucket.steps += group.steps
        bucket.area += group.area
        bucket.last_tokens = group.longest_tokens
        if group.home is None:
            heappush(bucket.queue, (-group.longest_tokens, group.context.seq, group))
    return bucket


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> StreamRLOracle:
    """Choose the longest group that an instance of its bucket has room for, and keep it there."""
    return StreamRLOracle(settings.long_share)


seer_make_placer = seer_make_prioritizer  # one object fills both slots
