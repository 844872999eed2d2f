"""The argument of a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

__all__ = ["Response"]


class Response(msgspec.Struct, frozen=True):
    """One finished response; ``metadata`` is that of its prompt, ``text`` is None without a tokenizer."""

    metadata: Mapping[str, Any]
    text: str | None
    token_ids: list[int]
    """The tokens of the response."""
    finish_reason: str
    """The reason why it is over, ``stop`` or ``length``."""
