"""Settings of ``[plugin.grouped_spec]``, and the part of them that goes on to each worker."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

from seer_core.plugins.config_types import MOST, Share

__all__ = ["Settings", "SourceSettings"]

Positive = Annotated[int, Meta(ge=1)]
Ttl = Annotated[float, Meta(gt=0, le=MOST)]


class SourceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Settings that the plug-in sends to its half in each worker."""

    policy: Literal["token", "class"] = "token"
    """``token`` verifies the most probable draft tokens of the whole batch, as many as pay; ``class`` gives
    probes and others a length each, as the paper does.
    """
    priority_factor: Annotated[float, Meta(ge=1, le=MOST)] = 2.0
    """The paper's lambda: how many tokens of other requests one token of a probe is worth."""
    lookup_min: Positive = 1
    """A draft begins after a match of at least so many tokens."""
    lookup_max: Annotated[int, Meta(ge=1, le=64)] = 64
    """The longest match that is looked for."""
    min_probability: Share = 0.0
    """A draft is cut where its chance of being accepted falls below this."""
    memory_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """The most memory that the index of one instance takes."""
    group_ttl_s: Ttl = 3600.0
    """A group whose index is unused for so long is dropped."""


class Settings(SourceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[plugin.grouped_spec]``: which drafts are made, and which of them are verified."""

    draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    """The longest draft: the paper's gamma_max."""
    profile: str = ""
    """A file of ``seer profile`` with the times of steps, relative to the config file. Without one each
    instance measures its own when it starts.
    """
    share: bool = True
    """Whether an instance also drafts from the text that siblings write on other instances."""
    earlier_responses: Annotated[int, Meta(ge=0, le=1 << 16)] = 0
    """Drafts come also from so many responses to the same prompt in earlier rollouts, the newest ones."""
    earlier_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    """The most memory, or disk, that earlier responses take, at 4 bytes a token; the oldest are dropped."""
    earlier_file: str = ""
    """A file that keeps earlier responses when the process ends, relative to the config file."""
