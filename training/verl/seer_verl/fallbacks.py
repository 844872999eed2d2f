"""The count of responses any turn of which was written without Seer's scheduler, in the actor of verl's load
balancer.

It outlives a scheduler that dies or hangs, and where it is not there no response goes without Seer.
"""

from __future__ import annotations

from typing import Any

__all__ = ["add_fallbacks"]


def add_fallbacks(balancer: Any, count: int, most: int | None = None) -> int:
    """Run in verl's balancer: return the run's count with so many more, which stay where it is no more than
    ``most``.
    """
    total = int(getattr(balancer, "seer_fallbacks", 0)) + count
    if most is None or total <= most:
        balancer.seer_fallbacks = total
    return total
