"""Context-aware scheduling: each group's first response tells how long the others will be."""

from typing import Annotated

from msgspec import Meta, Struct

from seer_context_sched.prioritizer import ContextAware
from seer_core.hookspecs import Startup, hookimpl

__all__ = ["ContextAware", "Settings"]


class Settings(Struct, frozen=True):
    """Every ``guard_interval``-th decision serves the group served least; 0 never does."""

    guard_interval: Annotated[int, Meta(ge=0)] = 32


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> ContextAware:
    """Order requests by what their groups have taught."""
    return ContextAware(settings.guard_interval)
