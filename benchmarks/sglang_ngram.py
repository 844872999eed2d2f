"""SGLang's own n-gram drafts, as a draft source: to compare with, verified by key like any others.

Does what SGLang's ``NGRAMWorker`` does with its ``NgramCorpus``: after each step the last 18 tokens of each
request go into the corpus, and what has followed the like, in any request, comes back as a tree of 12 nodes,
the last token written included.  Sizes are SGLang's defaults.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from seer_core.drafting import DraftBatch, DraftHost, DraftPolicy, SiblingText, SourceSpec, StepTimes
from seer_core.ports import ChunkJob

__all__ = ["NgramDrafter", "NgramSource"]

NODES = 12
DEPTH = 18


class NgramDrafter:
    """Drafter: names the source."""

    def source(self) -> SourceSpec:
        """Return the engine half; it needs no step times, for its trees have one size."""
        return SourceSpec("sglang_ngram:NgramSource", {}, NODES - 1, StepTimes((1,), (0,), ((0.001,),)))

    def shares(self) -> bool:
        """Return False: the corpus is its instance's."""
        return False

    def policy(self, step_times: StepTimes) -> DraftPolicy | None:
        """Return None: there is nothing to choose."""
        return None


class NgramSource:
    """DraftSource around SGLang's corpus."""

    def __init__(self, settings: Mapping[str, Any], host: DraftHost) -> None:
        from sglang.srt.speculative.cpp_ngram.ngram_corpus import NgramCorpus

        self._corpus = NgramCorpus(
            max_trie_depth=DEPTH, max_bfs_breadth=10, draft_token_num=NODES, capacity=10_000_000
        )
        self._opened = 0
        self._tails: dict[int, list[int]] = {}

    def open(self, job: ChunkJob) -> int:
        """Keep the text's end."""
        self._opened += 1
        self._tails[self._opened] = job.token_ids[-DEPTH:]
        return self._opened

    def learn(self, text: SiblingText) -> None:
        """Take in nothing: not called."""

    def propose(self, batch: DraftBatch) -> None:
        """Put what is new into the corpus, and write down the trees that it gives."""
        handles = batch.handles.tolist()
        for handle, written in zip(handles, batch.each_written(), strict=True):
            self._tails[handle] = [*self._tails[handle], *written.tolist()][-DEPTH:]
        texts = [self._tails[handle] for handle in handles]
        self._corpus.batch_put(texts)
        self._corpus.synchronize()
        found, masks = self._corpus.batch_get([*map(str, handles)], texts, batch.lengths.tolist())
        trees = found.reshape(-1, NODES), masks.reshape(-1, NODES, NODES)
        for b, (tokens, mask) in enumerate(zip(*trees, strict=True)):
            draft, parents = as_draft(tokens.tolist(), mask, int(batch.limits[b]))
            batch.drafts[b, : len(draft)] = draft
            batch.parents[b, : len(draft)] = parents
            batch.counts[b] = len(draft)

    def close(self, handle: int) -> None:
        """Forget the request; what it wrote stays in the corpus."""
        del self._tails[handle]
        self._corpus.erase_match_state([str(handle)])

    def forget(self, group_id: str) -> None:
        """Do nothing: the corpus knows no groups."""

    def reset(self) -> None:
        """Forget everything."""
        self._tails.clear()
        self._corpus.reset()

    def stats(self) -> dict[str, float]:
        """Return figures: none."""
        return {}

    def stop(self) -> None:
        """Do nothing."""


def as_draft(tokens: list[int], mask: np.ndarray, most: int) -> tuple[list[int], list[int]]:
    """Return a tree's tokens and their parents; zeros after the last token written only fill it up."""
    above = [int(np.flatnonzero(mask[node, :node])[-1]) for node in range(1, NODES)]
    nodes = NODES
    while nodes > 1 and (tokens[nodes - 1], above[nodes - 2]) == (0, 0):
        nodes -= 1
    nodes = min(nodes, most + 1)
    return tokens[1:nodes], [parent - 1 for parent in above[: nodes - 1]]
