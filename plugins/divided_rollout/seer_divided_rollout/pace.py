"""How fast each instance is beside the others, by how long the tokens of its chunks take.

A token takes longer where more requests run and contexts are longer.  So instances are compared at like
loads: the requests in flight, and their KV, at a chunk's begin or its end, whichever are more.  All is in
logarithms.  How a token's time grows with either load is learnt from changes within each instance, and is at
most in proportion to the load that has grown more.

While an instance starts, it may slow down others that share its machine, and after a loss others have more to
do at once.  So in a small fleet no time from before a start or a loss is compared with one from after it.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

import attrs

from seer_core.model import InstanceStatus, Request
from seer_core.model.events import ChunkFinished

__all__ = ["MeasuredPace", "PaceMeter"]

AT_ONCE, AT_FIRST = 2, 16
"""Chunks of an instance that are measured at a time, later and at first: those beside them see the same
steps."""
CHUNKS = 8
"""Chunks that a mean goes back, about."""
FEWEST = 4
"""Chunks that an instance is compared by, at least."""
FEWEST_TOKENS = 8
"""A shorter chunk is not measured."""
CONTEXT = 0.25
"""So is none that had to compute or to load more context than this share of its tokens."""
SMALL_FLEET = 16
"""With more instances, those of one machine count little in the mean, and some may start every minute:
measured anew each time, none would ever be compared.
"""

GROWTH_CHUNKS = 64
"""Chunks that the growth with the load goes back, about."""
VARIANCE = 1e-2
"""Variance of a load's logarithm within instances by which half of a growth is learnt."""
DOUBT = 0.25
"""How far from the growth that is learnt the true one may be, as a share of the way to the possible ones."""

APART, ALIKE = log(1.5), log(1.2)
"""An instance has another pace than so far if its times differ by so much more, or by so much less."""


@attrs.define(eq=False)
class MeasuredPace:
    """An instance's pace: ``token_s`` seconds for a request's token lately, 0 where none was measured yet.

    It takes ``slowness`` times as long as on the others, at like loads; 1 while no difference is sure.
    ``is_ready``: another chunk is to be measured.  The rest are the means of its last chunks, in logarithms,
    since the fleet's change with the number ``fleet``.
    """

    token_s: float = 0.0
    slowness: float = 1.0
    is_ready: bool = True
    timed: int = 0
    """How many of its chunks in flight are measured."""
    ended: int = 0
    """How many were to be measured, and are over."""
    chunks: int = 0
    """How many of these were measured."""
    token: float = 0.0
    requests: float = 0.0
    kv: float = 0.0
    apart: float = 0.0
    fleet: int = 0

    def begin_anew(self, fleet: int) -> None:
        """Forget the means, but not how far apart from the others it was found to be."""
        self.fleet, self.chunks, self.ended = fleet, 0, 0
        self.token = self.requests = self.kv = 0.0

    def count(self, change: int) -> None:
        """Count a chunk that is measured from now on, or not any more."""
        self.timed += change
        self.is_ready = self.timed < (AT_ONCE if self.ended >= AT_FIRST else AT_FIRST)


class PaceMeter:
    """Measures paces from what happens to chunks; O(1) for each."""

    def __init__(self) -> None:
        self.timed: dict[Request, tuple[MeasuredPace, float, int, int, int]] = {}
        """Where and when each chunk that is measured was sent, with the load and the fleet of then."""
        self._fleet = 0
        """How often the fleet has changed."""
        self._compared = 0
        self._token = self._requests = self._kv = 0.0
        """Sums over the instances that are compared, their times as if all had one pace."""
        self._rr = self._rk = self._kk = self._rt = self._kt = 0.0
        """Covariances within instances: of the loads, and of each with the time."""

    def newcomer(self, others: Iterable[MeasuredPace]) -> MeasuredPace:
        """Return the pace of an instance of which nothing is known: it counts as fast as the fastest."""
        apart = min((0.0, *(pace.apart for pace in others)))
        return MeasuredPace(slowness=exp(apart), apart=apart, fleet=self._fleet)

    def fleet_changed(self, instances: int) -> None:
        """Measure all anew, for one of so many instances has started or is lost."""
        if instances <= SMALL_FLEET:
            self._fleet += 1
            self._compared = 0
            self._token = self._requests = self._kv = 0.0

    def lose(self, pace: MeasuredPace) -> None:
        """Forget an instance, with the chunks that are in flight there."""
        for request in [request for request, sent in self.timed.items() if sent[0] is pace]:
            del self.timed[request]
        self._count(pace, -1)

    def send(self, pace: MeasuredPace, instance: InstanceStatus, request: Request, now: float) -> None:
        """Measure a chunk that is sent to an instance with this pace, once the load counts it."""
        self.timed[request] = pace, now, instance.running, instance.reserved_kv_tokens, self._fleet
        pace.count(1)

    def end(
        self, instance: InstanceStatus, request: Request, now: float, finished: ChunkFinished | None
    ) -> None:
        """Note that a chunk that is ``timed`` is over, while the load counts it; None: it brought nothing."""
        pace, began_s, requests, kv_tokens, fleet = self.timed.pop(request)
        pace.ended += 1
        pace.count(-1)
        if finished is not None and fleet == self._fleet:
            self._measure(instance, pace, now - began_s, requests, kv_tokens, finished)

    def _measure(
        self,
        instance: InstanceStatus,
        pace: MeasuredPace,
        seconds: float,
        requests: int,
        kv_tokens: int,
        finished: ChunkFinished,
    ) -> None:
        info, tokens = instance.info, finished.tokens
        requests, kv_tokens = max(requests, instance.running), max(kv_tokens, instance.reserved_kv_tokens)
        if tokens < FEWEST_TOKENS or finished.prefilled_tokens + finished.pool_tokens > CONTEXT * tokens:
            return
        if requests > info.max_running or kv_tokens > info.kv_capacity_tokens or seconds <= 0:
            return  # in the first two cases some have waited in its own queue
        if pace.fleet != self._fleet:
            pace.begin_anew(self._fleet)
        self._count(pace, -1)
        self._learn(pace, log(seconds / tokens), log(requests), log(max(kv_tokens, 1)))
        if self._compared and pace.chunks >= FEWEST:
            self._compare(pace)
            pace.slowness = exp(pace.apart)
        self._count(pace, 1)
        pace.token_s = exp(pace.token)

    def _count(self, pace: MeasuredPace, sign: int) -> None:
        if pace.chunks >= FEWEST and pace.fleet == self._fleet:
            self._compared += sign
            self._token += sign * (pace.token - pace.apart)
            self._requests += sign * pace.requests
            self._kv += sign * pace.kv

    def _learn(self, pace: MeasuredPace, token: float, requests: float, kv: float) -> None:
        """Add a chunk to the means of its instance, and its distance from them to the covariances."""
        token, requests, kv = token - pace.token, requests - pace.requests, kv - pace.kv
        if pace.chunks:
            share = 1 / GROWTH_CHUNKS
            self._rr += share * (requests * requests - self._rr)
            self._rk += share * (requests * kv - self._rk)
            self._kk += share * (kv * kv - self._kk)
            self._rt += share * (requests * token - self._rt)
            self._kt += share * (kv * token - self._kt)
        pace.chunks += 1
        share = 1 / min(pace.chunks, CHUNKS)
        pace.token += share * token
        pace.requests += share * requests
        pace.kv += share * kv

    def _compare(self, pace: MeasuredPace) -> None:
        """Give an instance another pace if its times at its load differ for sure from those of the others."""
        others = self._compared
        requests, kv = pace.requests - self._requests / others, pace.kv - self._kv / others
        least, most = min(0.0, requests, kv), max(0.0, requests, kv)
        growth = min(most, max(least, self._growth(requests, kv)))
        doubt = DOUBT + (1 - DOUBT) * VARIANCE / (VARIANCE + self._rr + self._kk)
        apart = pace.token - self._token / others - growth
        low, high = apart - doubt * (most - growth), apart + doubt * (growth - least)
        before = pace.apart
        if low > before + (APART if before >= 0 else ALIKE):
            pace.apart = low if before >= 0 else min(low, 0.0)
        elif high < before - (APART if before <= 0 else ALIKE):
            pace.apart = high if before <= 0 else max(high, 0.0)

    def _growth(self, requests: float, kv: float) -> float:
        """Return how much longer a token takes with so much more load of both kinds, by least squares."""
        rr, kk = self._rr + VARIANCE / 10, self._kk + VARIANCE / 10
        rest = rr * kk - self._rk * self._rk
        by_requests = (kk * self._rt - self._rk * self._kt) / rest
        by_kv = (rr * self._kt - self._rk * self._rt) / rest
        return min(1.0, max(0.0, by_requests)) * requests + min(1.0, max(0.0, by_kv)) * kv
