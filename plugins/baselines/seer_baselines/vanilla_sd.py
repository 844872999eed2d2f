"""Speculation without group context, for simulated engines: suffix decoding, a draft model, or MTP."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

from msgspec import Meta, Struct

from seer_core.plugins.hookspecs import Startup, hookimpl
from seer_core.ports.drafting import SourceSpec, StepTimes

__all__ = ["AdaptiveLength", "Settings", "VanillaDrafter"]

TIER = "supported"

DRAFT_TOKENS: Mapping[str, int] = {"suffix": 16, "draft_model": 3, "mtp": 1}
"""Longest draft of each method in the evaluation of arXiv 2511.14617."""

FIRST_ACCEPTANCE = 0.6
"""Assumed chance of a draft token before any was verified; the first steps replace it."""

MEMORY_DRAFTS = 1e5
"""Verified draft tokens after which the weight of older ones has halved."""


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.vanilla_sd]``: speculation without group context."""

    method: Literal["suffix", "draft_model", "mtp"] = "suffix"
    """How drafts are made: by suffix decoding, by a draft model, or by multi-token prediction."""
    draft_tokens: Annotated[int, Meta(ge=0, le=64)] = 0
    """The longest draft; 0 means the paper's, which is 16, 3 or 1 by method."""


class AdaptiveLength:
    """One draft length for all requests: the one with the most tokens per second, 0 included.

    With acceptance a per draft token, a step with g of them gives (1 - a^(g+1)) / (1 - a) tokens per
    request (arXiv 2211.17192).
    """

    def __init__(self, step_times: StepTimes, draft_tokens: int) -> None:
        self._step_times = step_times
        self._draft_tokens = draft_tokens
        self._tried = 1.0
        self._accepted = FIRST_ACCEPTANCE

    def lengths(self, probes: int, others: int) -> tuple[int, int]:
        """Return the same length twice: without groups there are no probes."""
        batch = probes + others
        acceptance = min(self._accepted / self._tried, 0.99)

        def tokens_per_s(length: int) -> float:
            gain = (1 - acceptance ** (length + 1)) / (1 - acceptance)
            return gain / self._step_times.at(batch, length)

        best = max(range(self._draft_tokens + 1), key=tokens_per_s)
        return best, best

    def record_acceptance(self, drafted_at: Sequence[float], accepted_at: Sequence[float]) -> None:
        """Take in what became of drafts; a token counts as tried if all before it were accepted."""
        reached = drafted_at[:1]
        for drafted, accepted in zip(drafted_at, accepted_at, strict=True):
            tried = min(drafted, *reached)
            self._tried += tried
            self._accepted += accepted
            reached = [accepted]
        if self._tried > MEMORY_DRAFTS:
            self._tried, self._accepted = self._tried / 2, self._accepted / 2


class VanillaDrafter:
    """Names the method to the simulator, which has the acceptance and the cost of its drafts."""

    def __init__(self, method: str, draft_tokens: int) -> None:
        self._method = method
        self._draft_tokens = draft_tokens

    def source(self) -> SourceSpec:
        """Return the method's name; only simulated engines have it (vLLM has ``vllm_suffix``)."""
        return SourceSpec(f"sim:{self._method}", {}, self._draft_tokens)

    def shares(self) -> bool:
        """Return False: siblings are not looked at."""
        return False

    def policy(self, step_times: StepTimes) -> AdaptiveLength:
        """Return the pure half for one instance."""
        return AdaptiveLength(step_times, self._draft_tokens)


@hookimpl
def seer_make_drafter(settings: Settings, startup: Startup) -> VanillaDrafter:
    """Speculate without looking at groups."""
    return VanillaDrafter(settings.method, settings.draft_tokens or DRAFT_TOKENS[settings.method])
