"""How fast each instance is beside the others, by how long the tokens of its chunks take.

A token takes longer where more requests run and contexts are longer.  So instances are compared at like
loads: the mean number of requests, and the mean KV, while a chunk ran.  All is in logarithms.  How a token's
time grows with either load is learnt from changes within each instance, and is at most in proportion to the
load that has grown more.
"""

from __future__ import annotations

from math import exp, log

import attrs

from seer_core.model import InstanceStatus, Request
from seer_core.model.events import ChunkFinished

__all__ = ["PaceMeter"]

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
    """Sums over an instance's time, and the means of its last chunks, in logarithms."""

    instance: InstanceStatus
    since_s: float
    requests_s: float = 0.0
    kv_tokens_s: float = 0.0
    sent: dict[Request, tuple[float, float, float]] = attrs.Factory(dict)
    """The time at which each chunk in flight was sent, and the sums of then."""
    chunks: int = 0
    token: float = 0.0
    requests: float = 0.0
    kv: float = 0.0
    slowness: float = 0.0

    def pass_time(self, now: float) -> None:
        """Add what has run since the last change of the load."""
        seconds = now - self.since_s
        if seconds:
            self.since_s = now
            self.requests_s += seconds * self.instance.running
            self.kv_tokens_s += seconds * self.instance.reserved_kv_tokens


class PaceMeter:
    """Measures ``InstanceStatus.token_s`` and ``slowness`` from what happens to chunks; O(1) for each."""

    def __init__(self) -> None:
        self._paces: dict[str, MeasuredPace] = {}
        self._compared = 0
        self._token = self._requests = self._kv = 0.0
        """Sums over the instances that are compared, their times as if all had one pace."""
        self._rr = self._rk = self._kk = self._rt = self._kt = 0.0
        """Covariances within instances: of the loads, and of each with the time."""

    def start(self, instance: InstanceStatus, now: float) -> None:
        """Measure an instance from now on."""
        self._paces[instance.id] = MeasuredPace(instance, now)

    def lose(self, instance: InstanceStatus) -> None:
        """Forget an instance."""
        self._count(self._paces.pop(instance.id), -1)

    def send(self, instance: InstanceStatus, request: Request, now: float) -> None:
        """Note a chunk that is sent, before the load counts it."""
        pace = self._paces[instance.id]
        pace.pass_time(now)
        pace.sent[request] = now, pace.requests_s, pace.kv_tokens_s

    def end(
        self, instance: InstanceStatus, request: Request, now: float, finished: ChunkFinished | None
    ) -> None:
        """Measure a chunk that is over, before the load leaves it out; None if it brought nothing."""
        pace = self._paces[instance.id]
        pace.pass_time(now)
        began_s, requests_s, kv_tokens_s = pace.sent.pop(request)
        took_s, info = now - began_s, instance.info
        if finished is None or took_s <= 0.0:
            return
        tokens = finished.tokens
        if tokens < FEWEST_TOKENS or finished.prefilled_tokens + finished.pool_tokens > CONTEXT * tokens:
            return
        requests = (pace.requests_s - requests_s) / took_s
        kv_tokens = (pace.kv_tokens_s - kv_tokens_s) / took_s
        if requests > info.max_running or kv_tokens > info.kv_capacity_tokens:
            return  # some have waited in its own queue
        self._count(pace, -1)
        self._learn(pace, log(took_s / tokens), log(max(requests, 1.0)), log(max(kv_tokens, 1.0)))
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
