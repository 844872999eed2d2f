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
    priority_factor: Annotated[float, Meta(ge=1, le=MOST)] = 2.0
    lookup_min: Positive = 1
    lookup_max: Annotated[int, Meta(ge=1, le=64)] = 64
    min_probability: Share = 0.0
    memory_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    group_ttl_s: Ttl = 3600.0


class Settings(SourceSettings, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``[plugin.grouped_spec]``.

    ``policy`` says what is drafted: "token" verifies the most probable draft tokens of the whole batch, as
    many as pay; "class" gives probes and others a length each, as the paper does.
    ``draft_tokens`` is the paper's gamma_max, ``priority_factor`` its lambda: what a probe's token is
    worth in tokens of others.  A draft begins after a match of at least ``lookup_min`` tokens and looks at
    ``lookup_max`` at most; one whose chance falls below ``min_probability`` is cut there.  ``memory_bytes``
    bounds the index of one instance; a group unused for ``group_ttl_s`` is dropped.  ``profile`` is a file of
    ``seer profile``, relative to the config; without one each instance measures its own step times when it
    starts.  With ``share`` an instance also drafts from what siblings write on other instances.
    """

    draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    profile: str = ""
    share: bool = True
