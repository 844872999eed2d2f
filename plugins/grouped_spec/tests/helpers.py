"""Drafts without the bookkeeping of arrays, and step times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from seer_grouped_spec._index import DraftIndex

from seer_core.ports.drafting import StepTimes

FOREVER = float("inf")

FLAT = StepTimes((1, 64), (0, 8), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing."""

STEEP = StepTimes((1, 64), (0, 8), ((1.0, 9.0), (64.0, 576.0)))
"""A draft token costs as much as a request."""

MEASURED = StepTimes(
    (1, 8, 32),
    (0, 2, 4, 8),
    (
        (0.0025, 0.0025, 0.0026, 0.0027),
        (0.0026, 0.0034, 0.0040, 0.0056),
        (0.0051, 0.0091, 0.0118, 0.0174),
    ),
)
"""A small model in vLLM on one CPU thread, with short contexts."""


def ids(*tokens: int) -> NDArray[np.int32]:
    """Return tokens as the array that the index takes."""
    return np.array(tokens, np.int32)


@dataclass
class Draft:
    """One request's draft; ``parents`` of a path are a chain."""

    tokens: list[int]
    probabilities: list[float]
    parents: list[int]

    def paths(self) -> list[list[int]]:
        """Return the tokens from the root to each node."""
        paths: list[list[int]] = []
        for token, parent in zip(self.tokens, self.parents, strict=True):
            paths.append(([] if parent < 0 else paths[parent]) + [token])
        return paths


def draft(
    index: DraftIndex,
    items: Sequence[tuple[int, Sequence[int]]],
    limit: int = 8,
    *,
    tree: bool = False,
    top_k: int = 0,
    max_depth: int = 0,
    paths: int = 0,
    width: int | None = None,
) -> list[Draft]:
    """Draft for (request, whole text) pairs in one call; the index may have part of a text already."""
    width = limit if width is None else width
    size = len(items)
    new_tokens = np.array([token for _, text in items for token in text], np.int32)
    lengths = np.array([len(text) for _, text in items], np.int32)
    limits = np.full(size, limit, np.int32)
    out, parents = np.full((2, size, width), -7, np.int32)
    probabilities, counts = np.zeros((size, width), np.float32), np.full(size, -7, np.int32)
    handles = np.array([request for request, _ in items], np.int64)
    asked = (handles, lengths, lengths, new_tokens, limits)
    if tree:
        index.draft_trees(*asked, out, parents, counts, probabilities, top_k, max_depth, paths)
    else:
        index.draft(*asked, out, counts, probabilities)
        parents[:] = np.arange(width) - 1
    return [
        Draft(out[b, :n].tolist(), probabilities[b, :n].tolist(), parents[b, :n].tolist())
        for b, n in enumerate(counts)
    ]
