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
Positive = Annotated[float, Meta(gt=0, le=MOST)]
Seconds = Annotated[float, Meta(gt=0, le=MOST_SECONDS)]
Share = Annotated[float, Meta(ge=0, le=1)]
