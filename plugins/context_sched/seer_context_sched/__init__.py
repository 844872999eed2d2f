"""Context-aware scheduling: the length of each group's first response estimates that of the others."""

from seer_context_sched.prioritizer import ContextAware
from seer_core.plugins.hookspecs import hookimpl

__all__ = ["ContextAware"]

TIER = "supported"


@hookimpl
def seer_make_prioritizer() -> ContextAware:
    """Return the queue that orders requests by the estimates of their groups."""
    return ContextAware()
