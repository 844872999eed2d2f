"""How a source's drafts are cut to what is worth verifying; one choice per instance.

Drafts may be trees, their most probable nodes first.  A tree is cut as a line is: its first tokens stay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

from seer_core.ports.drafting import DraftContext
from seer_grouped_spec._index import TokenChoice
from seer_grouped_spec.curves import StepCurves
from seer_grouped_spec.policy import MarginalBenefit
from seer_grouped_spec.settings import SourceSettings

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    Float32 = NDArray[np.float32]

__all__ = ["Choice", "ClassChoice", "OneLengthChoice", "make_choice"]


class Choice(Protocol):
    """The methods that ``TokenChoice``, in C++, and ``ClassChoice`` share; only ``open`` is not hot."""

    def open(self, handle: int, probe: bool) -> None:
        """Learn that a request, a probe or not, runs under this handle from now on."""
        ...

    def learn(self, handles: Int32, written: Int32, new_tokens: Int32, seconds: float) -> None:
        """Learn what became of the step that was last chosen for, how long it took, and who is here now.

        ``written`` [B] counts each request's new tokens; ``new_tokens`` holds them, request after request.
        """
        ...

    def choose(
        self,
        handles: Int32,
        lengths: Int32,
        counts: Int32,
        chances: Float32,
        drafts: Int32 | None = None,
        parents: Int32 | None = None,
    ) -> None:
        """Lower ``counts`` [B] of draft tokens to what is worth verifying.

        ``lengths`` [B] are the requests' tokens so far, ``chances`` [>= B, K] that a draft is accepted up to
        each token.  Trees come with their tokens and ``parents``, both [>= B, K].
        """
        ...


def make_choice(settings: SourceSettings, host: DraftContext) -> Choice:
    """Return the choice that ``policy`` names, or the one for engines whose drafts have one length."""
    if host.lengths:
        policy = MarginalBenefit(host.step_times, host.draft_tokens, allowed=host.lengths)
        return OneLengthChoice(policy, host.lengths)
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
        self._trees: dict[int, tuple[list[int], list[int]]] = {}
        self._steps = 0

    def open(self, handle: int, probe: bool) -> None:
        """See ``Choice``."""
        self._probes[handle] = probe
        self._drafted[handle] = 0
        self._trees.pop(handle, None)

    def learn(self, handles: Int32, written: Int32, new_tokens: Int32, seconds: float) -> None:
        """See ``Choice``; step times are believed as they were measured.

        A tree's token counts at the position where it stands in the draft, not at its depth.
        """
        self._steps += 1
        if self._steps % TokenChoice.LEARN_EVERY and not self._policy.exploring:
            return
        drafted = [self._drafted[handle] for handle in handles.tolist()]
        if self._trees:
            kept = self._kept(handles.tolist(), written.tolist(), new_tokens.tolist())
        else:
            accepted = [min(tokens - 1, most) for tokens, most in zip(written.tolist(), drafted, strict=True)]
            kept = [[True] * count for count in accepted]
        positions = range(max(drafted, default=0))
        self._policy.record_acceptance(
            [sum(count > j for count in drafted) for j in positions],
            [sum(any(each[j : j + 1]) for each in kept) for j in positions],
        )

    def _kept(self, handles: list[int], written: list[int], new_tokens: list[int]) -> list[list[bool]]:
        """Return which tokens of each request's tree were accepted."""
        kept, at = [], 0
        for handle, count in zip(handles, written, strict=True):
            tokens, parents = self._trees.get(handle, ([], []))
            kept.append(accepted_nodes(tokens, parents, new_tokens[at : at + count - 1] if count else []))
            at += count
        return kept

    def choose(
        self,
        handles: Int32,
        lengths: Int32,
        counts: Int32,
        chances: Any,
        drafts: Int32 | None = None,
        parents: Int32 | None = None,
    ) -> None:
        """See ``Choice``; who is a probe is all that counts."""
        batch = handles.tolist()
        probes = sum(self._probes[handle] for handle in batch)
        ours, theirs = self._policy.lengths(probes, len(batch) - probes)
        for b, (handle, count) in enumerate(zip(batch, counts.tolist(), strict=True)):
            chosen = min(count, ours if self._probes[handle] else theirs)
            counts[b] = self._drafted[handle] = chosen
            if drafts is not None and parents is not None:
                self._trees[handle] = drafts[b, :chosen].tolist(), parents[b, :chosen].tolist()


class OneLengthChoice:
    """One length for all drafts of a step, by the paper's rule for a batch of one class.

    A request with a shorter draft, or none, is padded, and costs as much.  So acceptance is learnt over all
    requests of a step: what a length gives is what the batch gains by it.
    """

    def __init__(self, policy: MarginalBenefit, lengths: Sequence[int]) -> None:
        self._policy = policy
        self._lengths = lengths
        self._length = 0
        self._drafting: set[int] = set()
        self._steps = 0

    def open(self, handle: int, probe: bool) -> None:
        """See ``Choice``; a probe gets no longer drafts than others."""
        self._drafting.discard(handle)

    def learn(self, handles: Int32, written: Int32, new_tokens: Int32, seconds: float) -> None:
        """See ``Choice``; step times are believed as they were measured."""
        self._steps += 1
        if not self._length or (self._steps % TokenChoice.LEARN_EVERY and not self._policy.exploring):
            return
        pairs = zip(handles.tolist(), written.tolist(), strict=True)
        kept = [tokens - 1 for handle, tokens in pairs if tokens and handle in self._drafting]
        positions = range(self._length)
        self._policy.record_acceptance(
            [len(kept)] * self._length, [sum(tokens > j for tokens in kept) for j in positions]
        )

    def choose(
        self,
        handles: Int32,
        lengths: Int32,
        counts: Int32,
        chances: Any,
        drafts: Int32 | None = None,
        parents: Int32 | None = None,
    ) -> None:
        """See ``Choice``; the engine pads to the least length that holds the longest draft."""
        _, wanted = self._policy.lengths(0, len(handles))
        counts[:] = counts.clip(max=self._holding(wanted))
        self._length = self._holding(int(counts.max(initial=0)))
        self._drafting = set(handles.tolist())

    def pads(self, batch: int) -> bool:
        """Whether a step of so many requests is faster with drafts that mean nothing than with none.

        So it is where the engine has CUDA graphs for steps with drafts alone.  Nothing is learnt from them.
        """
        return self._policy.fastest(batch) > 0

    def _holding(self, tokens: int) -> int:
        return min(length for length in self._lengths if length >= tokens)


def accepted_nodes(tokens: Sequence[int], parents: Sequence[int], accepted: Sequence[int]) -> list[bool]:
    """Return which nodes of a tree are on the path that was accepted."""
    depths: list[int] = []  # 0: not on it
    for token, parent in zip(tokens, parents, strict=True):
        above = 0 if parent < 0 else depths[parent]
        follows = (parent < 0 or above > 0) and accepted[above : above + 1] == [token]
        depths.append(above + 1 if follows else 0)
    return [depth > 0 for depth in depths]
