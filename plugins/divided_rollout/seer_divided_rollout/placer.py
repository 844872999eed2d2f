"""The placer: a chunk goes where there is KV for it, so that no engine ever has to preempt."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from heapq import heapify, heappop, heappush
from itertools import islice
from math import ceil, log2

import attrs

from seer_core.model import InstanceStatus, Request, RequestState
from seer_core.model.events import ChunkFinished
from seer_core.ports.policy import Placement, Placer
from seer_divided_rollout.pace import MeasuredPace, PaceMeter
from seer_divided_rollout.servers import Servers, keeps_whole

__all__ = ["KvAware", "Scorer", "free_kv", "move"]

Scorer = Callable[[Request, InstanceStatus, InstanceStatus | None], float]
"""A reason for an instance, or against it: as if so many more KV tokens were free there for this request.

It is called with the request, an instance, and the request's home, which has its KV, or None.
"""

Key = tuple[int, int, int, "RankedInstance"]
"""Minus the free KV, the last choice, the number, and the instance itself; the emptiest has the least."""

HOME = "home"

SIBLINGS = 8
"""Instances with siblings in flight that a decision looks at, the longest there first."""

COPIES = 2
"""Prompts that stay free where a prompt is kept that another instance keeps already.

With 0 every fourth prompt of half the context is a copy, with 2 every eighth; more leave too much free
(``docs/results/answered.md``).
"""

RESERVED_SHARE = 0.5
"""Part of a chunk that is reserved: a chunk in flight may be anywhere between its begin and its end, so on
average half of it is in use.

Where the uses of n chunks are independent, what they use differs from that by sqrt(n / 12) chunks (the
standard deviation of a uniform distribution is 1 / sqrt(12)).  A margin of three times as much gained nothing
(``docs/explain/divided-rollout.md``): a chunk that ends early costs no more than any chunk's end.
"""


FORGET_CHOICES = 256
"""An instance that counts as slower than others, and has stood idle for so many choices of these, is measured
anew."""

PAYS = 2.0
"""A move to a faster instance has to save so many times as much time as it costs, for both are estimates."""


def free_kv(request: Request, instance: InstanceStatus, home: InstanceStatus | None) -> int:
    """Scorer: the KV tokens that the request could have: free ones, and what siblings hold of its prompt."""
    info = instance.info
    free = info.kv_capacity_tokens - instance.reserved_kv_tokens
    return free + instance.shared_kv_tokens(request.group) if info.shares_prompts else free


def move(request: Request, instance: InstanceStatus, home: InstanceStatus | None) -> float:
    """Scorer: minus all KV of the home, where a move from there costs a prefill, and less where it does."""
    return 0.0 if home is None else -instance.info.move_cost_from(home.info) * home.info.kv_capacity_tokens


def _reserves_part(instance: InstanceStatus) -> bool:
    return instance.info.ends_early or instance.info.overcommits


@attrs.define(eq=False)
class RankedInstance:
    """An instance, the heap of those of its domain and its speed, and the key under which it is there.

    ``key`` is None while no slot is free.  ``chosen`` numbers the last choice of it.  ``halvings``: by how
    many powers of two it is slower than others, by its ``pace``.
    """

    instance: InstanceStatus
    heap: list[Key]
    pace: MeasuredPace
    halvings: int
    key: Key | None = None
    chosen: int = 0


class KvAware(Placer):
    """Chooses the instance with the most free KV, or the request's own while loads are close.

    It is a filter and scorers.  The filter lets an instance in or not.  The scorers, in KV tokens, are added
    up by their weights for each that is let in: ``free_kv``, ``move`` by ``stay_kv_fraction``, ``speed`` by
    ``speed_weight``, and further ``scorers``, each with its weight.  A request leaves its home only for an
    instance with a higher sum.

    The filter: a chunk is let in where ``reserved_share`` of it fits, if the instance ends chunks early where
    KV runs short all the same, or overcommits.  Elsewhere it has to fit whole.  A request whose KV is not
    there is let in only if, for each request in flight there, ``growth_headroom`` chunks like its own stay
    free: an instance filled to the brim has no room for anyone's next chunk, so all would have to move.  Both
    this and how far loads may be apart hold for moves that prefill everything again; where instances share KV
    they shrink to what a move costs there, as a share of that (``InstanceInfo.move_cost_from``).  Among
    equals the least recently chosen wins.

    Instances of another domain, which is a kind or a node that no pool spans, share no KV with the request's
    own (``InstanceInfo.kv_domain``).  So such a move costs a whole prefill.  It is made only if it leaves by
    so much more free than a move within the domain as it costs more.

    Where siblings share their prompt, what they hold of it counts as free to each of them.  A request without
    a home to stay at joins siblings rather than go where most is free, while its group saves what these are
    apart and they are no more than ``stay_kv_fraction`` apart; a further copy of a prompt is made only where
    ``COPIES`` of it stay free.  Otherwise it waits, for its siblings give way.

    Half the speed (``PaceMeter``, to the nearest power of two) counts as much as all KV in use: a slower
    instance gets a request only where no faster one lets it in, and the request leaves when one does, if what
    it has still to write there saves ``PAYS`` times as much time as its KV costs.  What is measured of an
    instance that is slower than another and stands idle is forgotten in the end, so one that was slow for a
    while works again.  An instance of which nothing is measured counts as fast as the fastest.  So while new
    requests come, none of equal instances stays idle for good.

    With ``whole_on_servers``, and on servers alone that share no KV, none of this counts: ``Servers`` places
    whole responses there, and ends some.

    For each domain and speed a heap of keys is kept up to date lazily, so a decision costs O(log n) over n
    instances; with further scorers it costs O(n log n).
    """

    def __init__(
        self,
        stay_kv_fraction: float,
        growth_headroom: float = 0.0,
        reserved_share: float = RESERVED_SHARE,
        scorers: Iterable[tuple[Scorer, float]] = (),
        speed_weight: float = 1.0,
        *,
        whole_on_servers: bool = False,
    ) -> None:
        self.stay_kv_fraction = stay_kv_fraction
        self.growth_headroom = growth_headroom
        self.reserved_share = reserved_share
        self.speed_weight = speed_weight
        self._further = tuple((score, weight) for score, weight in scorers if weight)
        self._scorers = self._further
        """What is added to free KV and the move: ``speed`` where instances are uneven, and the further."""
        self._instances: dict[int, RankedInstance] = {}
        self._by_id: dict[str | None, InstanceStatus] = {}
        self._choices = 0
        self._with_slots = 0
        self._heaps: dict[tuple[tuple[str, str], int], list[Key]] = {}
        self._heap: list[Key] | None = None
        """The only one, where there is one and no further scorer."""
        self._uneven = False
        """Whether some instances are slower than others."""
        self._meter = PaceMeter()
        self._timed = self._meter.timed
        self._now = 0.0
        self._sent: Request | None = None
        """The request that was placed last, if its chunk is to be measured."""
        self._keeps_whole = whole_on_servers
        self._servers: Servers | None = None
        """The instances, where responses stay whole on all of them."""

    def tick(self, now: float) -> None:
        """Take the time, by which chunks are measured."""
        self._now = now
        if self._servers is not None:
            self._servers.tick(now)

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Take in an instance's new load; one without a free slot is out of the running."""
        ranked = self._instances.get(instance.seq) or self._admit(instance)
        if self._servers is not None:
            self._servers.changed(instance)
        if (sent := self._sent) is not None:
            self._sent = None
            if sent.instance == instance.id and sent.state is RequestState.RUNNING:
                self._meter.send(ranked.pace, instance, sent, self._now)
        info, before = instance.info, ranked.key
        if instance.running >= info.max_running:
            if before is not None:
                ranked.key = None
                self._with_slots -= 1
            return
        negative_free, chosen = instance.reserved_kv_tokens - info.kv_capacity_tokens, ranked.chosen
        if before is None:
            self._with_slots += 1
        elif before[0] == negative_free and before[1] == chosen:
            return
        ranked.key = key = negative_free, chosen, instance.seq, ranked
        heap = ranked.heap
        heappush(heap, key)
        if len(heap) > 64 + 4 * len(self._instances):
            heap[:] = [key for key in heap if key[3].key is key]
            heapify(heap)

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget the instance."""
        ranked = self._instances.pop(instance.seq, None)
        if ranked is None:
            return
        self._meter.lose(ranked.pace)
        self._meter.fleet_changed(len(self._instances) + 1)
        self._by_id.pop(instance.id, None)
        self._leave_heap(ranked)
        self._note_servers()

    def chunk_ended(self, request: Request, instance: InstanceStatus, finished: ChunkFinished | None) -> None:
        """Measure the instance's pace by a chunk, if it is one of those."""
        if self._servers is not None:
            self._servers.ended(request, instance, finished)
        if request in self._timed:
            self._meter.end(instance, request, self._now, finished)
            self.pace_changed(instance)

    def pace_of(self, instance: InstanceStatus) -> MeasuredPace:
        """Return what is measured of an instance."""
        return self._instances[instance.seq].pace

    def pace_changed(self, instance: InstanceStatus) -> None:
        """Take in an instance's pace."""
        ranked = self._instances[instance.seq]
        halvings = self._halvings_of(ranked.pace)
        if halvings != ranked.halvings:
            ranked.halvings = halvings
            self._leave_heap(ranked)
            self._join_heap(ranked)
            self.instance_changed(instance)

    def has_room(self) -> bool:
        """Return whether any instance has a free slot: without one, home is full and no other is found."""
        return self._with_slots > 0

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> Placement | None:
        """Return the instance for this chunk, or None while it fits nowhere.

        The reason is ``home`` for the request's own instance.  Otherwise it goes to the emptiest one, or to
        one where siblings run, for the request is ``new`` or its own is ``lost``, ``full``, or ``slow``, or
        has so much less free that they are too far ``apart``.  With one instance the reason is ``only``.
        """
        if self._servers is not None:
            return self._servers.place(request)
        home = self._by_id.get(request.instance)
        if self._uneven and request.instance is None:
            self._forget_idle()
        emptiest = self._emptiest(home, request, chunk_tokens)
        if emptiest is None:
            return None
        best = emptiest
        if request.group.in_flight and emptiest.info.shares_prompts:
            best = self._joined(home, emptiest, request, chunk_tokens)
        why = self._why_not(home, best, request, chunk_tokens)
        if home is not None and why == HOME:
            best = home
        elif not self._admits(best, home, request, chunk_tokens):
            return None
        self._choices = number = self._choices + 1
        ranked = self._instances[best.seq]
        ranked.chosen = number
        if ranked.pace.is_ready:
            self._sent = request
        reserved = None
        if _reserves_part(best) and self.reserved_share != 1:
            reserved = ceil(self.reserved_share * chunk_tokens)
        return Placement(best, "only" if len(self._instances) == 1 else why, reserved)

    def to_end(self) -> Iterable[Request]:
        """Return those that are to end on servers where responses stay whole."""
        return () if self._servers is None else self._servers.to_end()

    def _footprint(self, instance: InstanceStatus, request: Request, chunk_tokens: int) -> int:
        """Return the KV tokens that such a chunk adds to what is reserved there."""
        if _reserves_part(instance):
            chunk_tokens = ceil(self.reserved_share * chunk_tokens)
        return instance.footprint(request, chunk_tokens)

    def _joined(
        self, home: InstanceStatus | None, emptiest: InstanceStatus, request: Request, chunk_tokens: int
    ) -> InstanceStatus:
        """Return the instance whose siblings a request joins if it leaves home, or the emptiest."""
        group = request.group
        saved = emptiest.prompt_kv_tokens(group)
        if not saved:
            return emptiest
        best, most = None, 0
        for instance_id in islice(group.in_flight, SIBLINGS):
            instance = self._by_id.get(instance_id)
            if instance is None or instance is home or instance.running >= instance.info.max_running:
                continue
            room = free_kv(request, instance, home)
            if best is not None and room <= most:
                continue
            if self._uneven and self._halvings(instance) > self._halvings(emptiest):
                continue
            if home is not None and instance.info.kv_domain not in (
                home.info.kv_domain,
                emptiest.info.kv_domain,
            ):
                continue
            if self._admits(instance, home, request, chunk_tokens):
                best, most = instance, room
        if best is None or not self._admits(emptiest, home, request, chunk_tokens):
            return best or emptiest
        near = min(saved * group.left, self.stay_kv_fraction * emptiest.info.kv_capacity_tokens)
        return best if free_kv(request, emptiest, home) - most <= near else emptiest

    def _admits(
        self, instance: InstanceStatus, home: InstanceStatus | None, request: Request, chunk_tokens: int
    ) -> bool:
        """Return whether a chunk fits there, and leaves free what a move or a copy has to."""
        info, group = instance.info, request.group
        free = info.kv_capacity_tokens - instance.reserved_kv_tokens
        free -= self._footprint(instance, request, chunk_tokens)
        if free < 0 or instance is home:
            return free >= 0
        # What a request from elsewhere must leave free, so that those that run there can grow.
        needed = self.growth_headroom * info.move_cost * chunk_tokens * instance.running
        if group.in_flight and instance.id not in group.in_flight:
            needed += COPIES * instance.prompt_kv_tokens(group)
        return free >= needed

    def _why_not(
        self, home: InstanceStatus | None, best: InstanceStatus, request: Request, chunk_tokens: int
    ) -> str:
        """Return why a request leaves its home for the best other instance, or that it does not."""
        if home is None:
            return "new" if request.instance is None else "lost"
        if (
            home.running >= home.info.max_running
            or self._footprint(home, request, chunk_tokens) > home.free_kv_tokens
        ):
            return "full"
        apart = free_kv(request, best, home) - free_kv(request, home, home)
        if apart <= 0 and not self._scorers:
            return HOME
        gain = apart + self.stay_kv_fraction * move(request, best, home)
        for score, weight in self._further:
            gain += weight * (score(request, best, home) - score(request, home, home))
        if self._uneven:
            faster = self.speed_weight * (self.speed(request, best, home) - self.speed(request, home, home))
            if gain <= 0 < gain + faster:
                return "slow" if self._pays(home, best, request, chunk_tokens) else HOME
            gain += faster
        return "apart" if gain > 0 else HOME

    def _pays(self, home: InstanceStatus, best: InstanceStatus, request: Request, chunk_tokens: int) -> bool:
        """Return whether the rest of a request saves more time on a faster instance than its move costs."""
        group, info, here, there = request.group, best.info, self.pace_of(home), self.pace_of(best)
        left = max(group.estimate_tokens - request.generated_tokens, chunk_tokens)
        saved_s = left * here.token_s * (1 - there.slowness / here.slowness)
        move_s = info.move_cost_from(home.info) * info.prefill_s_per_token * request.context_tokens
        return saved_s > PAYS * move_s

    def speed(self, request: Request, instance: InstanceStatus, home: InstanceStatus | None) -> int:
        """Scorer: minus all KV of the instance for each halving of its speed beside the others."""
        return -self._halvings(instance) * instance.info.kv_capacity_tokens

    def _forget_idle(self) -> None:
        """Forget the pace of slower instances that stood idle too long: other times may have come there."""
        fastest = min(halvings for _, halvings in self._heaps)
        for (_, halvings), heap in list(self._heaps.items()):
            key = self._top(heap) if halvings > fastest else None
            if key is None:
                continue
            ranked = key[3]  # the emptiest of its speed
            if ranked.instance.running or self._choices - ranked.chosen < FORGET_CHOICES:
                continue
            self._meter.lose(ranked.pace)
            ranked.pace = self._newcomer()
            self.pace_changed(ranked.instance)

    def _newcomer(self) -> MeasuredPace:
        """Return the pace of an instance of which nothing is known."""
        return self._meter.newcomer(ranked.pace for ranked in self._instances.values())

    def _halvings_of(self, pace: MeasuredPace) -> int:
        """Return by how many powers of two an instance is slower than others, if that counts."""
        return round(log2(pace.slowness)) if self.speed_weight else 0

    def _halvings(self, instance: InstanceStatus) -> int:
        return self._instances[instance.seq].halvings

    def _emptiest(
        self, home: InstanceStatus | None, request: Request, chunk_tokens: int
    ) -> InstanceStatus | None:
        """Return the instance with the most free KV, after what counts as less where instances differ."""
        if self._heap is not None:
            key = self._top(self._heap)
            return None if key is None else key[3].instance
        if self._further:
            keys = [ranked.key for ranked in self._instances.values() if ranked.key is not None]
        else:
            keys = [key for heap in self._heaps.values() if (key := self._top(heap)) is not None]
        found = [ranked.instance for _, _, _, ranked in sorted(keys)]
        if len(found) < 2 or (home is None and not self._scorers):
            return found[0] if found else None

        def worth(instance: InstanceStatus) -> float:
            worth = instance.free_kv_tokens + self.stay_kv_fraction * move(request, instance, home)
            return worth + sum(weight * score(request, instance, home) for score, weight in self._scorers)

        admitting = [each for each in found if self._admits(each, home, request, chunk_tokens)]
        return max(admitting or found[:1], key=worth)

    @staticmethod
    def _top(heap: list[Key]) -> Key | None:
        """Return a heap's least key that still holds."""
        while heap:
            key = heap[0]
            if key[3].key is key:
                return key
            heappop(heap)
        return None

    def _admit(self, instance: InstanceStatus) -> RankedInstance:
        self._by_id[instance.id] = instance
        self._meter.fleet_changed(len(self._instances) + 1)
        pace = self._newcomer()
        ranked = RankedInstance(instance, [], pace, self._halvings_of(pace))
        self._instances[instance.seq] = ranked
        self._join_heap(ranked)
        self._note_servers()
        return ranked

    def _note_servers(self) -> None:
        """Let responses stay whole while all instances are servers where that is better."""
        instances = [ranked.instance for ranked in self._instances.values()]
        if not (self._keeps_whole and instances and all(keeps_whole(each.info) for each in instances)):
            self._servers = None
            return
        if self._servers is None:
            self._servers = Servers(self._now)
        self._servers.follow(instances)

    def _join_heap(self, ranked: RankedInstance) -> None:
        """Put an instance into the heap of its domain and its speed, where its key comes next."""
        ranked.heap = self._heaps.setdefault((ranked.instance.info.kv_domain, ranked.halvings), [])
        self._note_heaps()

    def _leave_heap(self, ranked: RankedInstance) -> None:
        self._with_slots -= ranked.key is not None
        ranked.key = None
        used = {id(each.heap) for each in self._instances.values() if each is not ranked}
        self._heaps = {which: heap for which, heap in self._heaps.items() if id(heap) in used}
        self._note_heaps()

    def _note_heaps(self) -> None:
        only = len(self._heaps) == 1 and not self._further
        self._heap = next(iter(self._heaps.values())) if only else None
        self._uneven = len({halvings for _, halvings in self._heaps}) > 1
        speed: list[tuple[Scorer, float]] = [(self.speed, self.speed_weight)] if self._uneven else []
        self._scorers = (*speed, *self._further)
