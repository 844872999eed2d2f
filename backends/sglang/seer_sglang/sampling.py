"""Keyed sampling (``seer_worker.sampling.keyed``) in place of SGLang's sampler.

``ModelRunner.sample`` calls its ``sampler`` with one row of logits for each request of the batch, in order,
and with the position of the token that the row follows; it wants the tokens.  A row in the middle of a
prefill is sampled too, and thrown away.  SGLang's own parameters of a request are ignored here: what counts
stands in its chunk.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from seer_worker.sampling.sampler import Sampler
from torch import Tensor

from seer_core.ports.engine import ChunkJob

__all__ = ["ChunkState", "SglangSampler"]


class ChunkState:
    """A chunk, and the log-prob of each token that it has written."""

    def __init__(self, job: ChunkJob, *, to_the_end: bool = False) -> None:
        self.job = job
        self.to_the_end = to_the_end
        self.logprobs: list[float] = []

    def wrote(self, position: int, logprob: float) -> None:
        """Note a token's log-prob, unless the token was written before, or stands in the prompt.

        Both come in the middle of a prefill, a second one after a retraction included.
        """
        if position - len(self.job.token_ids) == len(self.logprobs):
            self.logprobs.append(logprob)


class SglangSampler:
    """Samples for a model runner; stands in for its ``sampler``."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._sampler = Sampler(vocab_size, device)
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
        places = [position + 1 for position in positions.tolist()]
        tokens, logprobs = self.sample(logits, self.batch, places)
        self.keep(self.batch, places, logprobs)
        return torch.tensor(tokens, dtype=torch.int64, device=logits.device)

    def sample(
        self, logits: Tensor, writings: Sequence[ChunkState], positions: Sequence[int]
    ) -> tuple[list[int], list[float]]:
        """Return the token of each row and its log-prob, of texts that have so many tokens so far."""
        jobs = [each.job for each in writings]
        return self._sampler.choose(logits[:, : self._vocab_size], jobs, positions)

    def keep(
        self, writings: Sequence[ChunkState], positions: Sequence[int], logprobs: Sequence[float]
    ) -> None:
        """Note the log-probs of tokens that count, in the order of their positions."""
        self.sound = self.sound and math.isfinite(sum(logprobs))
        for writing, position, logprob in zip(writings, positions, logprobs, strict=True):
            writing.wrote(position, logprob)
