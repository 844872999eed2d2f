"""What drafts in a worker: a ``DraftSource``, or a method that the engine brings itself.

An engine asks for drafts after each step, with the tokens just sampled.  ``Drafting`` is what both kinds
share: the time they take, the switch to made-up drafts while steps are measured, and what happens when they
fail.  A method that fails is not called again; the instance goes on without drafts, and the runtime is told.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from time import perf_counter
from typing import TYPE_CHECKING, Any

import numpy as np

from seer_core.drafting import DraftBatch, DraftSource, SiblingText, SourceSpec
from seer_core.errors import EngineError
from seer_core.ports import ChunkJob
from seer_host.loader import Kind
from seer_host.troubles import Troubles

if TYPE_CHECKING:
    from numpy.typing import NDArray

__all__ = ["SOURCE", "Drafting", "SourceProposer", "check_source"]

SOURCE: Kind[DraftSource] = Kind(
    "draft source", DraftSource, "correct what the drafter in [seer].plugins names, or drop that plug-in"
)

Drafts = list[list[int]]


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
        self.troubles = Troubles("drafting")
        self.made_up: int | None = None
        """While it is not None: so many tokens of no meaning for everyone, instead of drafts."""
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
        """Draft no more, and tell why."""
        self.failed = True
        traceback.print_exception(error)
        self.troubles.tell(f"the draft source failed: {type(error).__name__}: {error}")

    def _make_up(self, tokens: int) -> list[int]:
        self._offset = (self._offset + tokens) % (len(self._nonsense) - self.draft_tokens)
        return self._nonsense[self._offset : self._offset + tokens]


class SourceProposer:
    """Asks a source once per step for the whole batch, on the engine's own arrays.

    Chunks have to be opened before they run, by the ids the engine has for them, and closed.  Until
    ``attach``, and in processes without a source, nobody gets a draft.
    """

    def __init__(self, draft_tokens: int, vocab_size: int, max_running: int) -> None:
        self.drafting = Drafting(draft_tokens, vocab_size)
        self._vocab_size = vocab_size
        self._source: DraftSource | None = None
        self._request_ids: Callable[[], list[str]] = list
        self._batched: list[str] = []
        self._open: dict[str, tuple[int, int]] = {}
        self._batch: DraftBatch | None = None
        self._ends: list[int] = []
        self._rows = np.arange(max_running, dtype=np.int32)
        self._handles, self._sampled, self._limits, self._counts = (
            np.zeros(max_running, np.int32) for _ in range(4)
        )
        self._drafts = np.zeros((max_running, self.drafting.draft_tokens), np.int32)

    def attach(self, source: DraftSource, request_ids: Callable[[], list[str]]) -> None:
        """Draft with ``source``; ``request_ids`` returns the batch's, in order."""
        self._source, self._request_ids = source, request_ids

    def open(self, request_id: str, job: ChunkJob) -> None:
        """Tell the source that a chunk begins, and remember where it ends."""
        handle = self._tell("open", job)
        if handle is not None:
            self._open[request_id] = (handle, len(job.token_ids) + job.max_tokens)

    def close(self, request_id: str) -> None:
        """Tell the source that a chunk has ended."""
        opened = self._open.pop(request_id, None)
        if opened is not None:
            self._tell("close", opened[0])

    def learn(self, text: SiblingText) -> None:
        """Tell the source what a response has written on another instance."""
        self._tell("learn", text)

    def forget(self, group_id: str) -> None:
        """Tell the source that a group is over."""
        self._tell("forget", group_id)

    def reset(self) -> None:
        """Tell the source to drop everything."""
        self._tell("reset")

    def stats(self) -> dict[str, float]:
        """Return the source's figures."""
        try:
            return {str(name): float(value) for name, value in (self._tell("stats") or {}).items()}
        except Exception as error:
            self.drafting.fail(error)
            return {}

    def stop(self) -> None:
        """End what the source started."""
        if self._source is not None:
            with suppress(Exception):
                self._source.stop()

    def propose_for(
        self, sampled: list[list[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32]
    ) -> Drafts:
        """Return drafts for the next step, a list for each request of the batch.

        Args:
            sampled: the tokens that each request got in the step just made.
            lengths: prompt and response so far, [rows].
            tokens: these texts, [rows, max_model_tokens].
        """
        return self.drafting.draft(sampled, lambda: self._ask(sampled, lengths, tokens))

    def _ask(self, sampled: list[list[int]], lengths: NDArray[np.int32], tokens: NDArray[np.int32]) -> Drafts:
        if self._source is None:
            return [[] for _ in sampled]
        batch = self._arrange(lengths, tokens)
        # Lists, not numpy: on batches of this size it takes half the time.
        most, counts = self.drafting.draft_tokens, list(map(len, sampled))
        limits = [
            min(max(end - length - 1, 0), most) if count else 0  # 0 in the middle of a prefill
            for count, end, length in zip(counts, self._ends, batch.lengths.tolist(), strict=True)
        ]  # the token after the last draft may be the chunk's last
        batch.sampled[:] = counts
        batch.limits[:] = limits
        batch.counts.fill(0)
        self._source.propose(batch)
        counts = batch.counts.tolist()
        if not any(counts):
            return [[] for _ in sampled]
        if not all(0 <= count <= limit for count, limit in zip(counts, limits, strict=True)):
            raise ValueError(f"drafts of {counts} tokens for limits {limits}")
        drafts = [row[:count] for row, count in zip(batch.drafts.tolist(), counts, strict=True)]
        least, highest = min(map(min, filter(None, drafts))), max(map(max, filter(None, drafts)))
        if least < 0 or highest >= self._vocab_size:
            raise ValueError(f"drafts with tokens from {least} to {highest}")
        return drafts

    def _arrange(self, lengths: NDArray[np.int32], tokens: NDArray[np.int32]) -> DraftBatch:
        """Return the batch's arrays; made anew only where requests have come, gone or moved."""
        ids = self._request_ids()
        if self._batch is None or ids != self._batched:
            size = len(ids)
            opened = [self._open[id] for id in ids]
            self._handles[:size] = [handle for handle, _ in opened]
            self._ends = [end for _, end in opened]
            self._batched = list(ids)
            self._batch = DraftBatch(
                handles=self._handles[:size],
                rows=self._rows[:size],
                lengths=lengths[:size],
                sampled=self._sampled[:size],
                limits=self._limits[:size],
                tokens=tokens,
                drafts=self._drafts[:size],
                counts=self._counts[:size],
            )
        return self._batch

    def _tell(self, method: str, *arguments: Any) -> Any:
        """Call a method of the source; None without a source that works."""
        if self._source is None or self.drafting.failed:
            return None
        try:
            return getattr(self._source, method)(*arguments)
        except Exception as error:
            self.drafting.fail(error)
            return None
