"""The plug-ins ``vllm_ngram`` and ``vllm_suffix``: vLLM's own drafting, to compare with.

Both see one request at a time: n-gram lookup in the request's own text (arXiv 2304.04487), suffix decoding
over it and over all earlier responses of the instance (arXiv 2411.04975; needs ``arctic-inference``).
Their drafts are verified by key like any others, so the tokens are the same as without.
"""

from __future__ import annotations

from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta, Struct

from seer_core.drafting import DraftPolicy, SourceSpec, StepTimes
from seer_core.hookspecs import hookimpl
from seer_core.numbers import NotNegative, Share

__all__ = ["NGRAM", "OWN_METHODS", "SUFFIX", "NgramSettings", "OwnDrafter", "SuffixSettings"]

OWN_METHODS = ("vllm:ngram", "vllm:suffix")
"""What a ``SourceSpec`` names instead of a class."""

Positive = Annotated[int, Meta(ge=1)]


class NgramSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.vllm_ngram]``: drafts of ``draft_tokens`` after a match of so many tokens."""

    draft_tokens: Positive = 8
    prompt_lookup_min: Positive = 2
    prompt_lookup_max: Positive = 5


class SuffixSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.vllm_suffix]``: vLLM's names and defaults."""

    draft_tokens: Positive = 8
    suffix_decoding_max_tree_depth: Positive = 24
    suffix_decoding_max_cached_requests: Annotated[int, Meta(ge=0)] = 10_000
    suffix_decoding_max_spec_factor: NotNegative = 1.0
    suffix_decoding_min_token_prob: Share = 0.1


@attrs.frozen
class OwnDrafter:
    """A method that vLLM brings itself; nothing to start and no policy to ask."""

    method: str
    settings: Any

    async def start(self, instances: int) -> None:
        """Do nothing: each instance drafts by itself."""

    async def stop(self) -> None:
        """Do nothing."""

    def source(self) -> SourceSpec:
        """Name the method; its settings are vLLM's ``speculative_config``."""
        settings = msgspec.structs.asdict(self.settings)
        draft_tokens = settings.pop("draft_tokens")
        return SourceSpec(f"vllm:{self.method}", settings, draft_tokens)

    def shares(self) -> bool:
        """Return False: vLLM's methods look at the texts of their own instance."""
        return False

    def policy(self, step_times: StepTimes) -> DraftPolicy | None:
        """Return None: vLLM's draft lengths are fixed."""
        return None


class _Plugin:
    """What an entry point names: settings and one hook."""

    def __init__(self, method: str, settings: type[Struct]) -> None:
        self.method = method
        self.Settings = settings

    @hookimpl
    def seer_make_drafter(self, settings: Any) -> OwnDrafter:
        """Return the drafter."""
        return OwnDrafter(self.method, settings)


NGRAM = _Plugin("ngram", NgramSettings)
SUFFIX = _Plugin("suffix", SuffixSettings)
