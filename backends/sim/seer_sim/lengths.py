"""How long a response truly is: given by the job, or drawn from a group-correlated log-normal."""

from __future__ import annotations

from hashlib import blake2b
from math import exp, log, sqrt
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta

from seer_core.plugins.config_types import MOST, Share
from seer_core.ports.engine import ChunkJob

__all__ = ["CONTROLS", "PASSED_OVER", "Lengths", "Sigma", "normal_of"]

PASSED_OVER = ("min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""Fields of sampling that change which tokens are drawn: of invented ones none is."""

CONTROLS = (*PASSED_OVER, "min_tokens", "ignore_eos")
"""The fields of sampling that engines with invented tokens take."""

ENDLESS = 1 << 40
"""Tokens of a response that nothing but its limit ends."""

Sigma = Annotated[float, Meta(ge=0, le=10)]
"""Of a length's logarithm; with 10, one length in six is more than 20,000 times the median."""

_NORMAL = NormalDist()


class Lengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The distribution of response lengths for jobs that have none of their own: a group-correlated
    log-normal.
    """

    mean_tokens: Annotated[float, Meta(ge=1, le=MOST)] = 512.0
    """The mean length, before the cap."""
    sigma: Sigma = 0.8
    """The standard deviation of the length's logarithm."""
    group_share: Share = 0.5
    """The part of the logarithm's variance that siblings have in common."""
    cap_tokens: Annotated[int, Meta(ge=1)] = 4096
    """The longest response."""

    def of(self, job: ChunkJob) -> int:
        """Return the response's true length in tokens: the same for every chunk of a request."""
        if job.sampling.ignore_eos:
            return ENDLESS
        length = self._drawn(job) if job.known_tokens is None else job.known_tokens
        return max(length, job.sampling.min_tokens)

    def _drawn(self, job: ChunkJob) -> int:
        shared, own = normal_of(f"group {job.group_id}"), normal_of(f"seed {job.seed}")
        z = sqrt(self.group_share) * shared + sqrt(1 - self.group_share) * own
        length = exp(log(self.mean_tokens) - self.sigma**2 / 2 + self.sigma * z)
        return min(max(1, round(length)), self.cap_tokens)


def normal_of(text: str) -> float:
    """Return a standard normal number that depends on ``text`` only."""
    bits = int.from_bytes(blake2b(text.encode(), digest_size=6).digest(), "big")
    return _NORMAL.inv_cdf((bits + 0.5) / 2**48)
