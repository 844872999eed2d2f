"""How fast each instance is beside the others, by how long the tokens of its chunks take.

A token takes longer where more requests run and contexts are longer.  So instances are compared at like
loads: the requests in flight, and their KV, at a chunk's begin or its end, whichever are more.  All is in
logarithms.  How a token's time grows with either load is learnt from changes within each instance, and is at
most in proportion to the load that has grown more.
"""

from __future__ import annotations

from collections.abc import Iterable
from math import exp, log

import attrs

from seer_core.model import InstanceStatus, Request
from seer_core.model.events import ChunkFinished

__all__ = ["PaceMeter"]

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
    """The means of an instance's last chunks, in logarithms."""

    timed: int = 0
    """How many of its chunks in flight are measured."""
    chunks: int = 0
    token: float = 0.0
    requests: float = 0.0
    kv: float = 0.0
    slowness: float = 0.0

    @property
    def is_ready(self) -> bool:
        """Whether another chunk is to be measured."""
        return self.timed < (AT_ONCE if self.chunks >= AT_FIRST else AT_FIRST)


class PaceMeter:
    """Measures ``InstanceStatus.token_s`` and ``slowness`` from what happens to chunks; O(1) for each."""

    def __init__(self) -> None:
        self.ready: set[str] = set()
        """The instances whose next chunk is measured."""
        self.timed: dict[Request, tuple[float, int, int]] = {}
        """When each chunk that is measured was sent, with the load of then."""
        self._paces: dict[str, MeasuredPace] = {}
        self._compared = 0
        self._token = self._requests = self._kv = 0.0
        """Sums over the instances that are compared, their times as if all had one pace."""
        self._rr = self._rk = self._kk = self._rt = self._kt = 0.0
        """Covariances within instances: of the loads, and of each with the time."""

    def start(self, instance: InstanceStatus) -> None:
        """Measure an instance from now on."""
        self._paces[instance.id] = MeasuredPace()
        self.ready.add(instance.id)

    def lose(self, instance: InstanceStatus, on_it: Iterable[Request]) -> None:
        """Forget an instance, with the chunks that are in flight there."""
        self.ready.discard(instance.id)
        for request in on_it:
            self.timed.pop(request, None)
        self._count(self._paces.pop(instance.id), -1)

    def send(self, instance: InstanceStatus, request: Request, now: float) -> None:
        """Measure a chunk that is sent, once the load counts it, to an instance that is ``ready``."""
        self.timed[request] = now, instance.running, instance.reserved_kv_tokens
        pace = self._paces[instance.id]
        pace.timed += 1
        if not pace.is_ready:
            self.ready.remove(instance.id)

    def end(
        self, instance: InstanceStatus, request: Request, now: float, finished: ChunkFinished | None
    ) -> None:
        """Note that a chunk that is ``timed`` is over, while the load counts it; None: it brought nothing."""
        sent, pace = self.timed.pop(request), self._paces[instance.id]
        pace.timed -= 1
        if pace.is_ready:
            self.ready.add(instance.id)
        if finished is not None:
            self._measure(instance, pace, sent, now, finished)

    def _measure(
        self,
        instance: InstanceStatus,
        pace: MeasuredPace,
        sent: tuple[float, int, int],
        now: float,
        finished: ChunkFinished,
    ) -> None:
        (began_s, requests, kv_tokens), info, tokens = sent, instance.info, finished.tokens
        requests, kv_tokens = max(requests, instance.running), max(kv_tokens, instance.reserved_kv_tokens)
        if tokens < FEWEST_TOKENS or finished.prefilled_tokens + finished.pool_tokens > CONTEXT * tokens:
            return
        if requests > info.max_running or kv_tokens > info.kv_capacity_tokens or now <= began_s:
            return  # in the first two cases some have waited in its own queue
        self._count(pace, -1)
        self._learn(pace, log((now - began_s) / tokens), log(requests), log(max(kv_tokens, 1)))
        if self._compared and pace.chunks >= FEWEST:
            self._compare(pace)
            instance.slowness = exp(pace.slowness)
        self._count(pace, 1)
        instance.token_s = exp(pace.token)

    def _count(self, pace: MeasuredPace, sign: int) -> None:
        if pace.chunks >= FEWEST:
            self._compared += sign
            self._token += sign * (pace.token - pace.slowness)
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
        before = pace.slowness
        if low > before + (APART if before >= 0 else ALIKE):
            pace.slowness = low if before >= 0 else min(low, 0.0)
        elif high < before - (APART if before <= 0 else ALIKE):
            pace.slowness = high if before <= 0 else max(high, 0.0)

    def _growth(self, requests: float, kv: float) -> float:
        """Return how much longer a token takes with so much more load of both kinds, by least squares."""
        rr, kk = self._rr + VARIANCE / 10, self._kk + VARIANCE / 10
        rest = rr * kk - self._rk * self._rk
        by_requests = (kk * self._rt - self._rk * self._kt) / rest
        by_kv = (rr * self._kt - self._rk * self._rt) / rest
        return min(1.0, max(0.0, by_requests)) * requests + min(1.0, max(0.0, by_kv)) * kv
