"""Longest plausible remainder first, by the lengths of a group's responses so far, finished or not."""

from typing import Annotated

from msgspec import Meta, Struct

from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_length_posterior.bound import SHAPES, GroupPosterior, Shapes
from seer_length_posterior.prioritizer import LongestPlausible

__all__ = ["SHAPES", "GroupPosterior", "LongestPlausible", "Settings", "Shapes"]

TIER = "supported"


class Settings(Struct, frozen=True):
    """``[plugin.length_posterior]``: how cautious to be, and how long a turn lasts."""

    surprise: Annotated[float, Meta(ge=1e-12, lt=1)] = 0.05
    """The probability with which a response may still turn out longer than is taken for plausible."""
    turn_tokens: Annotated[int, Meta(ge=1)] | Annotated[str, Meta(pattern="^auto$")] = "auto"
    """A request keeps its place until it has generated so many tokens; 1 gives every chunk a turn. ``auto``
    is 1 where instances share KV, and an eighth of ``max_tokens`` where a turn begins with a prefill.
    """


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> LongestPlausible:
    """Order requests by how many tokens they may plausibly have left."""
    turn = settings.turn_tokens
    return LongestPlausible(settings.surprise, turn if isinstance(turn, int) else None)
