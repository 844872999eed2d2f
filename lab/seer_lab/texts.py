"""Recorded text of a workload: what its prompts and responses say, for engines that read it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["RecordedText"]


class RecordedText(msgspec.Struct, frozen=True):
    """Token ids of prompts, by group, as far as they were recorded, and of whole responses, by request.

    A response ends with a token that ends it, unless it is among those that were ``cut``.
    """

    prompts: Mapping[str, tuple[int, ...]]
    responses: Mapping[str, tuple[int, ...]]
    cut: frozenset[str] = frozenset()
