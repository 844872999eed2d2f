"""Order by the last epoch's lengths: prompts come again, and their responses are about as long."""

from __future__ import annotations

from msgspec import Struct

from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_rivals.expected_lengths import EarlierLengths, read_lengths
from seer_rivals.longest_remaining import LongestRemaining

__all__ = ["Settings"]

TIER = "experimental"


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.history]``: where lengths of the last epoch stand."""

    lengths: str = ""
    """A JSON file with the lengths of the last epoch's responses, a list for each group's id, relative to
    the config file. Without one they come with the prompts, as in ``seer sim``.
    """


@hookimpl
def seer_make_prioritizer(settings: Settings, startup: Startup) -> LongestRemaining:
    """Order requests by what the last epoch's responses to the same prompt had left."""
    by_group = read_lengths(startup.path(settings.lengths)) if settings.lengths else None
    return LongestRemaining(EarlierLengths(by_group).remaining)
