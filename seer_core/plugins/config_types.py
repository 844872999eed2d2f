"""Numbers that a setting may be: finite, so that neither infinity nor NaN gets past a config."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

__all__ = ["MOST", "NotNegative", "Positive", "Seconds", "Share"]

MOST = 1e100
"""Beyond anything meant: of what is larger, products and quotients may become infinite."""

MOST_SECONDS = 1e9
"""Thirty years; the operating system's waits take no more than some 9e9."""

NotNegative = Annotated[float, Meta(ge=0, le=MOST)]
"""Type of a setting that is a finite number, 0 or more."""

Positive = Annotated[float, Meta(gt=0, le=MOST)]
"""Type of a setting that is a finite number above 0."""

Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
"""Type of a setting that is a time limit in seconds, as the operating system takes it."""

Share = Annotated[float, Meta(ge=0, le=1)]
"""Type of a setting that is a number from 0 to 1."""
