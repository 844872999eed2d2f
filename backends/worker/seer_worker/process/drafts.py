"""Drafting in a worker: by a ``DraftSource``, or by a method that the engine brings itself.

An engine asks for drafts after each step, with the tokens just sampled.  ``Drafting`` is what both kinds
share: the time they take, the switch to made-up drafts while steps are measured, and what happens when they
fail.  A method that fails is not called again; the instance goes on without drafts, and reports it to the
runtime.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from itertools import chain
from time import perf_counter
from typing import Any

import attrs
import numpy as np
import structlog
from msgspec import structs
from numpy.typing import NDArray

from seer_core.errors import EngineError
from seer_core.ports.drafting import (
    DraftBatch,
    DraftContext,
    DraftSource,
    SiblingTokens,
    SourceSpec,
    tree_flaw,
)
from seer_core.ports.engine import ChunkJob
from seer_worker.process.degradation_log import DegradationLog
from seer_worker.process.loader import ImportedClass
from seer_worker.wire import Degraded

__all__ = ["SOURCE", "Drafting", "SourceProposer", "check_source"]

log = structlog.get_logger("seer")

SOURCE: ImportedClass[DraftSource] = ImportedClass(
    "draft source", DraftSource, "correct what the drafter in [seer].plugins names, or drop that plug-in"
)

Drafts = list[list[int]]
Ints = NDArray[np.int32] | Sequence[int]
Text = Callable[[int, int, int], list[int]]


def check_source(spec: SourceSpec, own_methods: Sequence[str]) -> None:
    """Make sure that a source is one of the engine's own methods, or a class that can be imported.

    Raises:
        EngineError: there is no such source.
    """
    if spec.draft_tokens < 1:
        raise EngineError(
            f"draft source {spec.path!r}: {spec.draft_tokens} draft tokens; it must be 1 at least"
        )
    if spec.path in own_methods:
        return
    engine, _, _ = spec.path.partition(":")
    own = [method for name, _, method in (each.partition(":") for each in own_methods) if name == engine]
    if own:
        raise EngineError(f"draft source {spec.path!r}: of {engine}'s methods only {', '.join(own)} will do")
    SOURCE.load(spec.path)


class Drafting:
    """Drafts for a batch, timed; without any once the method behind it has failed."""

    def __init__(self, draft_tokens: int, vocab_size: int) -> None:
        self.draft_tokens = draft_tokens
        self.seconds = 0.0
        self.failed = False
        self.degradations = DegradationLog("drafting")
        self.made_up: int | None = None
        """While it is not None: so many tokens of no meaning for every request, instead of drafts."""
        self._nonsense: list[int] = np.random.default_rng(0).integers(0, vocab_size, 1 << 12).tolist()
        self._offset = 0

    def draft(self, sampled: Sequence[Sequence[int]], propose: Callable[[], Drafts]) -> Drafts:
        """Return drafts, a list for each request: what ``propose`` returns, if all is well."""
        if self.made_up is not None:
            return [self._make_up(self.made_up) if tokens else [] for tokens in sampled]
        if self.failed:
            return [[] for _ in sampled]
        begun = perf_counter()
        try:
            return propose()
        except Exception as error:
            self.fail(error)
            return [[] for _ in sampled]
        finally:
            self.seconds += perf_counter() - begun

    def fail(self, error: Exception) -> None:
        """Draft no more, and report the reason."""
        self.failed = True
        log.error("draft_source_failed", exc_info=error)
        self.degradations.report(f"the draft source failed: {type(error).__name__}: {error}")

    def _make_up(self, tokens: int) -> list[int]:
        self._offset = (self._offset + tokens) % (len(self._nonsense) - self.draft_tokens)
        return self._nonsense[self._offset : self._offset + tokens]


@attrs.define(eq=False)
class _Chunk:
    """An open chunk: the source's handle of it, its length at most, and how many tokens the source has."""

    handle: int
    end: int
    known: int


class SourceProposer:
    """Asks a source once per step for the whole batch; a ``DraftControl`` for the worker.

    Chunks have to be opened before they run, by the ids the engine has for them, and closed.  Until
    ``attach``, and in processes without a source, no request gets a draft.  Engines that verify more than one
    of a draft's ``paths`` at once ask for trees.
    """

    takes_source = True

    def __init__(self, draft_tokens: int, vocab_size: int, max_running: int, paths: int = 1) -> None:
        self.drafting = Drafting(draft_tokens, vocab_size)
        self._vocab_size = vocab_size
        self.paths = paths
        self.source: DraftSource | None = None
        self.request_ids: Callable[[], list[str]] = list
        """Returns the engine's ids of the batch, in order."""
        self._batched: list[str] = []
        self.opened: dict[str, _Chunk] = {}
        self._batch: DraftBatch | None = None
        self._chunks: list[_Chunk] = []
        self._last, self._known, self._handles, self._lengths, self._written, self._limits, self._counts = (
            np.zeros(max_running, np.int32) for _ in range(7)
        )
        self._drafts = np.zeros((max_running, draft_tokens), np.int32)
        self._columns = np.arange(draft_tokens, dtype=np.int32)
        self._line = self._columns - 1
        self._parents = np.tile(self._line, (max_running, 1))

    def attach(self, spec: SourceSpec, host: DraftContext) -> None:
        """Make the source, and draft with it from now on."""
        host = structs.replace(host, report=self.drafting.degradations.report)
        self.source = SOURCE.make(spec.path, spec.settings, host)

    def open(self, request_id: str, job: ChunkJob) -> None:
        """Open a chunk in the source, and remember where it ends."""
        handle = self._call("open", job)
        if handle is not None:
            tokens = len(job.token_ids)
            self.opened[request_id] = _Chunk(handle, tokens + job.max_tokens, tokens)

    def close(self, *request_ids: str) -> None:
        """Close chunks in the source."""
        for request_id in request_ids:
            opened = self.opened.pop(request_id, None)
            if opened is not None:
                self._call("close", opened.handle)

    def add_sibling_tokens(self, text: SiblingTokens) -> None:
        """Pass on to the source what a response has written on another instance."""
        self._call("add_sibling_tokens", text)

    def forget(self, group_id: str) -> None:
        """Have the source drop a group that is over."""
        self._call("forget", group_id)

    def reset(self) -> None:
        """Have the source drop everything."""
        self._call("reset")

    def report(self) -> tuple[float, dict[str, float]]:
        """Return the seconds spent on drafts, and the source's figures."""
        try:
            figures = {str(name): float(value) for name, value in (self._call("stats") or {}).items()}
        except Exception as error:
            self.drafting.fail(error)
        return self.drafting.seconds, {"failed": 1.0} if self.drafting.failed else figures

    def take_degradations(self) -> list[Degraded]:
        """Return what has failed since the last call."""
        return self.drafting.degradations.take()

    def stop(self) -> None:
        """End what the source started."""
        if self.source is not None:
            with suppress(Exception):
                self.source.stop()

    def propose_for(
        self, sampled: list[list[int]], lengths: Ints, text: Text, most: int | None = None
    ) -> Drafts:
        """Return drafts for the next step, a list for each request of the batch.

        Args:
            sampled: the tokens that each request got in the step just made.
            lengths: tokens of its prompt and response so far.
            text: ``text(b, start, stop)`` returns tokens of request b; asked for those of steps that went by
                without this call.
            most: draft tokens of a request at most, where the engine has not room for as many as ever.
        """
        room = self.drafting.draft_tokens if most is None else most
        drafts = self.drafting.draft(sampled, lambda: self._ask(sampled, lengths, text, room))
        return drafts if most is None else [draft[:most] for draft in drafts]

    def propose_trees(
        self, sampled: list[list[int]], lengths: Ints, text: Text, most: int | None = None
    ) -> tuple[Drafts, Drafts]:
        """Return trees for the next step: each request's tokens, and each token's parent (``DraftBatch``)."""
        self._parents[:] = self._line
        drafts = self.propose_for(sampled, lengths, text, most)
        parents = self._parents[: len(drafts)].tolist()
        return drafts, [row[: len(draft)] for row, draft in zip(parents, drafts, strict=True)]

    def _ask(self, sampled: list[list[int]], lengths: Ints, text: Text, most: int) -> Drafts:
        if self.source is None:
            return [[] for _ in sampled]
        batch = self._arrange()
        size, known, limits = len(sampled), self._known[: len(sampled)], batch.limits
        batch.lengths[:] = lengths
        batch.written[:] = np.fromiter(map(len, sampled), np.int32, size)
        # The token after the last draft may be the chunk's last.
        np.subtract(self._last[:size], batch.lengths, out=limits)
        np.minimum(limits, most, out=limits)
        np.maximum(limits, 0, out=limits)
        limits *= batch.written > 0  # none in the midst of a prefill
        known += batch.written
        if (known != batch.lengths).any():
            known -= batch.written
            parts = zip(known.tolist(), batch.lengths.tolist(), strict=True)
            sampled = [text(b, start, stop) for b, (start, stop) in enumerate(parts)]
            batch.written[:] = batch.lengths - known
            known[:] = batch.lengths
        batch.new_tokens = np.fromiter(chain.from_iterable(sampled), np.int32)
        batch.counts.fill(0)
        self.source.propose(batch)
        return self._checked(batch)

    def _checked(self, batch: DraftBatch) -> Drafts:
        """Return the drafts of a batch, a list for each request.

        Raises:
            ValueError: they are longer than their limits, or no tokens of the vocabulary, or no trees.
        """
        counts = batch.counts
        if not counts.any():
            return [[] for _ in range(len(counts))]
        if counts.min() < 0 or (counts > batch.limits).any():
            raise ValueError(f"drafts of {counts.tolist()} tokens for limits {batch.limits.tolist()}")
        tokens = batch.drafts[self._columns < counts[:, None]]
        least, highest = int(tokens.min()), int(tokens.max())
        if least < 0 or highest >= self._vocab_size:
            raise ValueError(f"drafts with tokens from {least} to {highest}")
        drafts = [row[:count] for row, count in zip(batch.drafts.tolist(), counts.tolist(), strict=True)]
        if self.paths > 1:
            for draft, parents in zip(drafts, batch.parents.tolist(), strict=True):
                flaw = tree_flaw(draft, parents[: len(draft)], self.paths)
                if flaw is not None:
                    raise ValueError(f"a draft with {flaw}")
        return drafts

    def _arrange(self) -> DraftBatch:
        """Return the batch's arrays; made anew only where requests have come, gone or moved."""
        ids = self.request_ids()
        if self._batch is None or ids != self._batched:
            for chunk, known in zip(self._chunks, self._known.tolist(), strict=False):
                chunk.known = known
            size = len(ids)
            self._chunks = chunks = [self.opened[id] for id in ids]
            self._handles[:size] = [chunk.handle for chunk in chunks]
            self._last[:size] = [chunk.end - 1 for chunk in chunks]
            self._known[:size] = [chunk.known for chunk in chunks]
            self._batched = list(ids)
            self._batch = DraftBatch(
                handles=self._handles[:size],
                lengths=self._lengths[:size],
                written=self._written[:size],
                new_tokens=self._written[:0],
                limits=self._limits[:size],
                drafts=self._drafts[:size],
                parents=self._parents[:size],
                counts=self._counts[:size],
            )
        return self._batch

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the source; None without a source that works."""
        if self.source is None or self.drafting.failed:
            return None
        try:
            return getattr(self.source, method)(*arguments)
        except Exception as error:
            self.drafting.fail(error)
            return None
