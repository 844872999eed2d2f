"""Longest plausible remainder first: every response so far, finished or not, tells of its group's lengths."""

from typing import Annotated

from msgspec import Meta, Struct

from seer_core.hookspecs import Startup, hookimpl
from seer_length_posterior.bound import SHAPES, GroupLengths, Shapes
from seer_length_posterior.prioritizer import LongestPlausible

__all__ = ["SHAPES", "GroupLengths", "LongestPlausible", "Settings", "Shapes"]


class Settings(Struct, frozen=True):
    """How cautious to be, and how long a turn lasts.

    ``surprise`` is the probability with which a response may still turn out longer than is taken for
    plausible.  A request keeps its place until it has generated ``turn_tokens``: 1 gives every chunk a turn.
    """

    surprise: Annotated[float, Meta(ge=1e-12, lt=1)] = 0.05
    turn_tokens: Annotated[int, Meta(ge=1)] = 1


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> LongestPlausible:
    """Order requests by how many tokens they may plausibly have left."""
    return LongestPlausible(settings.surprise, settings.turn_tokens)
