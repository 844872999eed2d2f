"""Recorded text of a workload: what its prompts and responses say, for engines that read it."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

__all__ = ["Text"]


class Text(msgspec.Struct, frozen=True):
    """Token ids of prompts, by group, and of whole responses, by request; each ends with its end token."""

    prompts: Mapping[str, tuple[int, ...]]
    responses: Mapping[str, tuple[int, ...]]
