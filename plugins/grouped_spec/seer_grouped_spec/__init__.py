"""Grouped speculative decoding: one draft index per prompt group, served to every engine."""

from seer_grouped_spec._index import DraftIndex, DraftIndexError, IndexStats, Voting

__all__ = ["DraftIndex", "DraftIndexError", "IndexStats", "Voting"]
