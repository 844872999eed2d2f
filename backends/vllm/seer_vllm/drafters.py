"""The plug-ins ``vllm_ngram`` and ``vllm_suffix``: vLLM's own drafting, to compare with.

Both see one request at a time: n-gram lookup in the request's own text (arXiv 2304.04487), suffix decoding
over it and over all earlier responses of the instance (arXiv 2411.04975; needs ``arctic-inference``).
Their drafts are verified by key like any others, so the tokens are the same as without.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any

import attrs
from msgspec import Meta, Struct

from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.drafting import DraftPolicy, SourceSpec, StepTimes

__all__ = ["NGRAM", "OWN_METHODS", "SUFFIX", "BuiltinDrafter", "OwnSettings"]

OWN_METHODS = ("vllm:ngram", "vllm:suffix")
"""What a ``SourceSpec`` names instead of a class."""


NGRAM_MATCH = {"prompt_lookup_min": 2, "prompt_lookup_max": 5}
"""Tokens of a match that n-gram drafts follow.  Of suffix decoding vLLM's own defaults hold."""


class OwnSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.vllm_ngram]`` and ``[plugin.vllm_suffix]``: vLLM's own methods of drafting."""

    draft_tokens: Annotated[int, Meta(ge=1)] = 8
    """The longest draft."""


@attrs.frozen
class BuiltinDrafter:
    """A method that vLLM brings itself; no policy to ask."""

    method: str
    draft_tokens: int
    arguments: Mapping[str, int]
    """Further keys of vLLM's ``speculative_config``."""

    def source(self) -> SourceSpec:
        """Name the method."""
        return SourceSpec(f"vllm:{self.method}", self.arguments, self.draft_tokens)

    def shares(self) -> bool:
        """Return False: vLLM's methods look at the texts of their own instance."""
        return False

    def policy(self, step_times: StepTimes) -> DraftPolicy | None:
        """Return None: vLLM's draft lengths are fixed."""
        return None


class _Plugin:
    """A plug-in for an entry point to name: settings and one hook."""

    Settings = OwnSettings

    def __init__(self, method: str, arguments: Mapping[str, int]) -> None:
        self.method = method
        self.arguments = arguments

    @hookimpl
    def seer_make_drafter(self, settings: Any) -> BuiltinDrafter:
        """Return the drafter."""
        return BuiltinDrafter(self.method, settings.draft_tokens, self.arguments)


NGRAM = _Plugin("ngram", NGRAM_MATCH)
SUFFIX = _Plugin("suffix", {})
