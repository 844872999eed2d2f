"""Keyed sampling (``seer_worker.sampling.keyed``) in place of SGLang's sampler.

``ModelRunner.sample`` calls its ``sampler`` with one row of logits for each request of the batch, in order,
and with the position of the token that the row follows; it wants the tokens.  A row in the middle of a
prefill is sampled too, and thrown away.  SGLang's own parameters of a request are ignored here: what counts
stands in its chunk.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from seer_worker.sampling.grammars import grammars_of
from seer_worker.sampling.sampler import Sampler
from seer_worker.sampling.sending import sent
from torch import Tensor

from seer_core.ports.engine import ChunkJob
from seer_sglang.ranks import RankGroup

__all__ = ["ChunkState", "SglangSampler"]


class ChunkState:
    """A chunk, and for each token that it has written its log-prob and the most probable tokens.

    Args:
        job: the chunk.
        output_ids: returns the tokens that it has written.
        to_the_end: whether it goes on past tokens that end responses.
    """

    def __init__(
        self,
        job: ChunkJob,
        output_ids: Callable[[], Sequence[int]] = tuple,
        *,
        to_the_end: bool = False,
    ) -> None:
        self.job = job
        self.to_the_end = to_the_end
        self.logprobs: list[float] = []
        self.tops: list[Sequence[tuple[int, float]]] = []
        self._output_ids = output_ids

    @property
    def sound(self) -> bool:
        """Whether a token has been written, the last one with a finite log-prob.

        Then the KV of all before it is finite, too.
        """
        return bool(self.logprobs) and math.isfinite(self.logprobs[-1])

    def text(self, position: int, drafts: Sequence[int] = ()) -> list[int]:
        """Return the tokens before a position, of which the last are ``drafts``."""
        return [*[*self.job.token_ids, *self._output_ids()][: position - len(drafts)], *drafts]

    def wrote(self, position: int, logprob: float, top: Sequence[tuple[int, float]] = ()) -> None:
        """Note a token's log-prob and the most probable tokens in its place.

        Nothing is noted of a token that was written before, or stands in the prompt.  Both come in the middle
        of a prefill, a second one after a retraction included.
        """
        if position - len(self.job.token_ids) == len(self.logprobs):
            self.logprobs.append(logprob)
            self.tops.append(top)


class SglangSampler:
    """Samples for a model runner; stands in for its ``sampler``.

    Of several ``ranks``, rank 0 samples for all.
    """

    def __init__(
        self, vocab_size: int, device: torch.device, ends: Collection[int], model_dir: str, ranks: RankGroup
    ) -> None:
        self._sampler = Sampler(vocab_size, device)
        self._ranks = ranks
        self._grammars = partial(grammars_of, model_dir, vocab_size)
        self._ends = ends
        self._vocab_size = vocab_size
        self.batch: Sequence[ChunkState] = ()
        self.sound = True
        """Whether all log-probs of the last step are finite numbers; without, its KV is no better."""
        self.watch = self._sampler.watch

    def expect(self, batch: Sequence[ChunkState]) -> None:
        """Take the requests whose rows come next, in order."""
        self.batch = batch
        self.sound = True

    def __call__(
        self,
        logits_output: Any,
        sampling_info: Any,
        return_logprob: bool,
        top_logprobs_nums: Any,
        token_ids_logprobs: Any,
        positions: Tensor,
    ) -> Tensor:
        """Return the next token of each row, int64 [rows]."""
        logits = logits_output.next_token_logits
        if len(logits) != len(self.batch):
            raise RuntimeError(f"{len(logits)} rows of logits for {len(self.batch)} requests")
        tokens, logprobs, places = self.sample(logits, self.batch, positions.long() + 1)
        self.keep(self.batch, places, logprobs, lambda: logits)
        return sent(np.array(tokens, dtype=np.int64), logits.device)

    def sample(
        self,
        logits: Tensor,
        writings: Sequence[ChunkState],
        places: Tensor,
        drafts: Callable[[int], Sequence[int]] = lambda row: (),
    ) -> tuple[list[int], list[float], list[int]]:
        """Return the token of each row, its log-prob and its position, of texts with so many tokens so far.

        Args:
            logits: one row for each, [rows, vocab or more].
            writings: the chunks.
            places: the numbers of tokens, int64 [rows], where the logits are.
            drafts: returns the last of these tokens, those that are drafts, by the row.
        """
        jobs = [each.job for each in writings]
        controlled = any(job.sampling.changes_logits for job in jobs)
        positions = places.tolist() if controlled else []  # a wait, for a text ends there

        def text(row: int) -> Sequence[int]:
            return writings[row].text(positions[row], drafts(row))

        return self._ranks.agreed(
            lambda: self._sampler.choose_at(
                logits[:, : self._vocab_size], jobs, places, text, self._ends, self._grammars
            )
        )

    def keep(
        self,
        writings: Sequence[ChunkState],
        positions: Sequence[int],
        logprobs: Sequence[float],
        rows: Callable[[], Tensor],
    ) -> None:
        """Note the log-probs of tokens that count, in the order of positions; ``rows`` has their logits."""
        self.sound = self.sound and math.isfinite(sum(logprobs))
        jobs = [each.job for each in writings]
        tops: Sequence[Sequence[tuple[int, float]]] = [()] * len(jobs)
        if self._ranks.number == 0 and any(job.sampling.top_logprobs for job in jobs):
            tops = self._sampler.most_probable(rows()[:, : self._vocab_size], jobs)
        for writing, position, logprob, top in zip(writings, positions, logprobs, tops, strict=True):
            writing.wrote(position, logprob, top)
