"""How a source's drafts are cut to what is worth verifying; one choice per instance."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from seer_core.drafting import DraftHost
from seer_grouped_spec._index import TokenChoice
from seer_grouped_spec.curves import StepCurves
from seer_grouped_spec.policy import MarginalBenefit
from seer_grouped_spec.settings import SourceSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    Float32 = NDArray[np.float32]

__all__ = ["Choice", "ClassChoice", "make_choice"]


class Choice(Protocol):
    """What ``TokenChoice``, in C++, and ``ClassChoice`` have in common; only ``open`` is not hot."""

    def open(self, handle: int, probe: bool) -> None:
        """Learn that a request, a probe or not, runs under this handle from now on."""
        ...

    def learn(self, handles: Int32, sampled: Int32, seconds: float) -> None:
        """Learn what became of the step that was last chosen for, how long it took, and who is here now."""
        ...

    def choose(self, handles: Int32, lengths: Int32, counts: Int32, chances: Float32) -> None:
        """Lower ``counts`` [B] of draft tokens to what is worth verifying.

        ``lengths`` [B] are the requests' tokens so far, ``chances`` [>= B, K] that a draft is accepted up to
        each token.
        """
        ...


def make_choice(settings: SourceSettings, host: DraftHost) -> Choice:
    """Return the choice that ``policy`` names."""
    if settings.policy == "class":
        return ClassChoice(MarginalBenefit(host.step_times, host.draft_tokens, settings.priority_factor))
    profile = StepCurves(host.step_times, host.draft_tokens).table(host.max_running)
    return TokenChoice(profile, settings.priority_factor)


class ClassChoice:
    """The paper's: drafts of one length for all probes, and of one for all others."""

    def __init__(self, policy: MarginalBenefit) -> None:
        self._policy = policy
        self._probes: dict[int, bool] = {}
        self._drafted: dict[int, int] = {}
        self._steps = 0

    def open(self, handle: int, probe: bool) -> None:
        """See ``Choice``."""
        self._probes[handle] = probe
        self._drafted[handle] = 0

    def learn(self, handles: Int32, sampled: Int32, seconds: float) -> None:
        """See ``Choice``; step times are believed as they were measured."""
        self._steps += 1
        if self._steps % TokenChoice.LEARN_EVERY and not self._policy.exploring:
            return
        drafted = [self._drafted[handle] for handle in handles.tolist()]
        accepted = [min(tokens - 1, most) for tokens, most in zip(sampled.tolist(), drafted, strict=True)]
        positions = range(max(drafted, default=0))
        self._policy.learn(
            [sum(count > j for count in drafted) for j in positions],
            [sum(count > j for count in accepted) for j in positions],
        )

    def choose(self, handles: Int32, lengths: Int32, counts: Int32, chances: Any) -> None:
        """See ``Choice``; who is a probe is all that counts."""
        batch = handles.tolist()
        probes = sum(self._probes[handle] for handle in batch)
        ours, theirs = self._policy.lengths(probes, len(batch) - probes)
        for b, (handle, count) in enumerate(zip(batch, counts.tolist(), strict=True)):
            chosen = min(count, ours if self._probes[handle] else theirs)
            counts[b] = self._drafted[handle] = chosen
