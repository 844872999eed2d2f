"""GPUs as their makers describe them, and the least time that a kernel takes on one."""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["TARGETS", "Target", "least_time"]

LANES = 128
"""Instructions of threads that a multiprocessor issues at a time, four warps of 32."""


class Target(NamedTuple):
    """A kind of GPU: bytes per second of its memory, multiprocessors, and cycles per second under load."""

    capability: int
    device: str
    bandwidth: float
    multiprocessors: int
    clock: float


TARGETS = {
    "sm_80": Target(80, "A100 SXM 80 GB", 2.039e12, 108, 1.41e9),
    "sm_90": Target(90, "H100 SXM", 3.35e12, 132, 1.755e9),
    "sm_100": Target(100, "B200", 8.0e12, 148, 1.965e9),
}


def least_time(target: Target, logits: int, itemsize: int, per_logit: float) -> tuple[float, float]:
    """Return seconds to read so many logits from memory, and seconds to issue their instructions."""
    issued = target.multiprocessors * LANES * target.clock
    return logits * itemsize / target.bandwidth, logits * per_logit / issued
