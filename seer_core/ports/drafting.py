"""Speculation: what a drafting technique, an engine and the core agree on.

A technique fills the slot ``drafter`` with a ``Drafter``, which lives beside the runtime.  It has two
halves.  The pure half, a ``DraftPolicy``, says how long drafts should be; simulated engines ask it
directly.  The engine half, a ``DraftSource``, is named by import path, made in each engine's worker,
and called once per step for the whole batch; so an engine depends on these Protocols and never on the
plug-in.  Drafts only propose: an engine accepts a draft token exactly when it is the token it would have
sampled.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import attrs
import msgspec

from seer_core.errors import ignore_report
from seer_core.model.arrays import Tokens
from seer_core.model.chunks import ChunkJob

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]

__all__ = [
    "DraftBatch",
    "DraftContext",
    "DraftPolicy",
    "DraftSource",
    "Drafter",
    "ResponseMemory",
    "SiblingTokens",
    "SourceSpec",
    "StepTimes",
    "tree_flaw",
]


LEAST_STEP_S, MOST_STEP_S = 1e-12, 1e9
MOST_COUNT = 2**40
"""What steps may take, and be made of: beyond is an error of measurement, and of arithmetic soon after."""


class StepTimes(msgspec.Struct, frozen=True):
    """Measured duration of one engine step: the T(B, gamma) of the paper, on a grid whose axes rise."""

    batch: tuple[int, ...]
    """The first axis: decoding requests in a step."""
    draft_tokens: tuple[int, ...]
    """The second axis: draft tokens of each request; it starts at 0."""
    seconds: tuple[tuple[float, ...], ...]
    """The time of a step, as ``seconds[i][j]`` for ``batch[i]`` and ``draft_tokens[j]``."""
    context_tokens: int = 0
    """About how many tokens of context each request had; 0 is unknown."""

    def __post_init__(self) -> None:
        axes = (self.batch, self.draft_tokens)
        rises = all(a < b for axis in axes for a, b in pairwise(axis))
        full = len(self.seconds) == len(self.batch) and all(
            len(row) == len(self.draft_tokens) for row in self.seconds
        )
        if not (self.batch and self.draft_tokens[:1] == (0,) and self.batch[0] >= 1 and rises and full):
            raise ValueError("step times need rising axes, draft_tokens from 0, and a value for each pair")
        if not all(LEAST_STEP_S <= value <= MOST_STEP_S for row in self.seconds for value in row):
            raise ValueError(f"step times must be positive: from {LEAST_STEP_S:g} s to {MOST_STEP_S:g} s")
        if max(*self.batch, *self.draft_tokens, self.context_tokens) > MOST_COUNT or self.context_tokens < 0:
            raise ValueError(f"batches, drafts and contexts of step times end at {MOST_COUNT:,}")

    def at(self, batch: float, draft_tokens: float) -> float:
        """Return the seconds of a step, interpolated; beyond the grid the last slope goes on, if it rises."""
        lower, share = _locate(self.batch, batch)
        here = self._along(lower, draft_tokens)
        return here if share == 0.0 else _line(here, self._along(lower + 1, draft_tokens), share)

    def _along(self, index: int, draft_tokens: float) -> float:
        row = self.seconds[index]
        lower, share = _locate(self.draft_tokens, draft_tokens)
        return row[lower] if share == 0.0 else _line(row[lower], row[lower + 1], share)


def _line(first: float, second: float, share: float) -> float:
    """Go from one value towards another, and past it only upwards: measured noise must not fall below 0."""
    return second if share > 1.0 and second < first else first + share * (second - first)


def _locate(axis: Sequence[int], value: float) -> tuple[int, float]:
    """Return the cell of ``axis`` that speaks for ``value``, and how far along it ``value`` lies."""
    if len(axis) == 1 or value <= axis[0]:
        return 0, 0.0
    lower = min(bisect_right(axis, value) - 1, len(axis) - 2)
    return lower, (value - axis[lower]) / (axis[lower + 1] - axis[lower])


class SourceSpec(msgspec.Struct, frozen=True):
    """The engine half of a drafter, by name: what a worker imports and what it is made with.

    ``path`` is ``package.module:Class``, a ``DraftSource`` called with ``(settings, host)``, or
    ``<engine>:<method>`` for a method of drafting that the engine brings itself.  ``settings`` is plain
    data.  No draft is longer than ``draft_tokens``.  ``step_times`` None: the worker measures its own
    before it is ready.
    """

    path: str
    settings: Mapping[str, Any]
    draft_tokens: int
    step_times: StepTimes | None = None


class DraftContext(msgspec.Struct, frozen=True):
    """The instance that a draft source works in.

    ``paths`` is how many paths of a draft the engine verifies at once: 1 is a line, more are a tree.
    ``lengths`` are those of which all drafts of a step get one, rising from 0, where the engine needs that:
    it pads each to the least that holds the longest.  Without any, each draft has its own length.
    ``report(reason)`` lets the user see that the source drafts less than it should, or not at all: the run's
    log and summary say so.  It may be called from any thread, and returns at once; a reason that has been
    reported is not reported again.  ``clock`` returns seconds as the instance's steps take them, where
    that is not the machine's own time.
    """

    instance_id: str
    """The instance's id."""
    max_running: int
    """The most requests of a step."""
    max_model_tokens: int
    """The most tokens of a prompt and its response."""
    vocab_size: int
    """The number of token ids."""
    draft_tokens: int
    """The most draft tokens of a request in a step."""
    step_times: StepTimes
    """Measured step times of the instance, or None."""
    paths: int = 1
    lengths: tuple[int, ...] = ()
    report: Callable[[str], None] = ignore_report
    """Called with a reason when the source does less than it should."""
    clock: Callable[[], float] | None = None


class SiblingTokens(msgspec.Struct, frozen=True, gc=False):
    """Tokens that a response of a group has written on other instances, from its token ``start`` on."""

    rollout_id: str
    """The rollout, an id that no other one has."""
    group_id: str
    """The group."""
    request_id: str
    """The response that they are of."""
    start: int
    token_ids: Tokens
    """The tokens."""


@attrs.define(eq=False)
class DraftBatch:
    """One step's requests for drafts, and where the drafts go; B requests, at most K tokens each.

    All arrays are int32, and the engine's own.  ``handles`` [B] are what ``open`` returned.  Request b has
    written ``written[b]`` tokens since the source was last asked, or received the chunk: one more than the
    drafts that the step accepted, none in a prefill, and more where steps went by without being asked.
    They stand in ``new_tokens`` [sum of ``written``], one request's after the other's.  With them its prompt
    and response have ``lengths[b]`` tokens.

    The source writes up to ``limits[b]`` tokens into ``drafts[b]`` [B, K], and their number into
    ``counts[b]``, which comes as 0.  Where ``DraftContext.paths`` is above 1, drafts may be trees of at most
    so many leaves: ``parents[b, j]`` [B, K] is the place in ``drafts[b]`` of the token that comes before
    token j, or -1 for the last token written.  Parents come before their children, and two children of one
    parent are different tokens.  ``parents`` comes as that of a line, j - 1, so who drafts lines need not
    touch it.
    """

    handles: Int32
    lengths: Int32
    written: Int32
    new_tokens: Int32
    limits: Int32
    drafts: Int32
    parents: Int32
    counts: Int32

    def each_written(self) -> Iterator[Int32]:
        """Yield each request's new tokens."""
        end = 0
        for count in self.written.tolist():
            yield self.new_tokens[end : end + count]
            end += count


def tree_flaw(tokens: Sequence[int], parents: Sequence[int], paths: int) -> str | None:
    """Return what is wrong with a draft that may be a tree of at most so many paths; None if nothing is."""
    for place, parent in enumerate(parents):
        if not -1 <= parent < place:
            return f"token {place} has parent {parent}, which does not come before it"
    if len(set(zip(parents, tokens, strict=True))) < len(tokens):
        return f"two children of one parent are the same token: {list(tokens)} after {list(parents)}"
    leaves = len(tokens) - len(set(parents) - {-1})
    return f"{leaves} paths, where the engine verifies {paths}" if leaves > paths else None


class DraftSource(Protocol):
    """Drafts for one instance, in its worker; every method returns at once, and only ``propose`` is hot.

    Made by ``Class(settings, host)``.  A source that cannot draft writes counts of 0; if a method
    raises, the instance goes on without drafts and reports the reason to the runtime.
    """

    def open(self, job: ChunkJob) -> int:
        """Learn that a chunk begins here, with all its tokens so far; return the handle of its drafts."""
        ...

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Take in what a sibling has written elsewhere; called if the drafter ``shares``, between steps.

        It comes after the first chunk of its group has begun here.  Nothing comes twice, but what the
        response had written here before it moved may overlap, and so may a group be over or dropped.
        """
        ...

    def propose(self, batch: DraftBatch) -> None:
        """Write drafts for the next step; called after each step that decoded anything."""
        ...

    def close(self, handle: int) -> None:
        """Learn that a chunk has ended here; its text may go on to help its group."""
        ...

    def forget(self, group_id: str) -> None:
        """Drop a group, known or not: no chunk of it will come again."""
        ...

    def reset(self) -> None:
        """Drop everything; no chunk is open."""
        ...

    def stats(self) -> dict[str, float]:
        """Return figures for the trace, by name: bytes held, groups, staleness and so on."""
        ...

    def stop(self) -> None:
        """End threads and connections; bounded."""
        ...


class DraftPolicy(Protocol):
    """How long drafts are on one instance: pure, and fed by what became of earlier ones.

    Requests are of two classes: probes, the first of their group, whose length is awaited, and others.
    """

    def lengths(self, probes: int, others: int) -> tuple[int, int]:
        """Return the draft tokens per probe and per other request for a step of so many; (0, 0) is off."""
        ...

    def record_acceptance(self, drafted_at: Sequence[float], accepted_at: Sequence[float]) -> None:
        """Take in how many drafts reached position 1, 2, ..., and how many were accepted there."""
        ...


@runtime_checkable
class Drafter(Protocol):
    """Drafting for all instances of a run."""

    def source(self) -> SourceSpec:
        """Return what each engine's worker loads; asked once per start of an instance."""
        ...

    def shares(self) -> bool:
        """Return whether sources use what siblings write on other instances; always the
        same answer.
        """
        ...

    def policy(self, step_times: StepTimes) -> DraftPolicy | None:
        """Return the pure half for one instance with these step times; None if there is none."""
        ...


@runtime_checkable
class ResponseMemory(Protocol):
    """The further methods of a ``Drafter`` that drafts from responses of earlier rollouts, too.

    The runtime calls them on the event loop, if the drafter ``shares``; each returns at once.
    """

    def recall(self, prompt: Sequence[int]) -> Sequence[Tokens]:
        """Return earlier responses to a prompt, the oldest first.

        Instances that work on a group with this prompt are sent them like siblings' tokens.
        """
        ...

    def remember(self, prompt: Sequence[int], response: Tokens) -> None:
        """Take in a response that has ended."""
        ...

    def clear(self) -> None:
        """Recall no more of what was taken in before."""
        ...
