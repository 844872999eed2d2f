"""The argument of a reward function."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from seer_core.model import TurnRecord

__all__ = ["Response"]


class Response(msgspec.Struct, frozen=True):
    """One finished response; ``metadata`` is that of its prompt, ``text`` is None without a tokenizer."""

    metadata: Mapping[str, Any]
    text: str | None
    token_ids: list[int]
    """The tokens of the response, those of its environment included."""
    finish_reason: str
    """The reason why it is over, ``stop`` or ``length``."""
    turns: list[TurnRecord] = []
    """Its turns, where an environment answers them, without their seconds: a reward must not depend on
    those. Their tokens are those of the response, in order.
    """
    environment_reward: float | None = None
    """The sum of the rewards that its environment gave, to which the function's is added; None where it gave
    none.
    """
