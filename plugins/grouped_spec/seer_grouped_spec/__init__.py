"""Grouped speculative decoding: one draft index per prompt group, served to every engine."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer_grouped_spec._index import DraftIndex, DraftIndexError, IndexStats, Voting

__all__ = ["DraftIndex", "DraftIndexError", "IndexStats", "Voting"]


def __getattr__(name: str) -> Any:
    """Load the compiled index when it is first asked for: ``seer doctor`` must be able to miss it."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from seer_grouped_spec import _index

    return getattr(_index, name)
