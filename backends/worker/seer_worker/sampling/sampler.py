"""Keyed sampling for an engine that has a batch of chunks and a row of logits for each."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import numpy as np
import torch
from torch import Tensor

from seer_core.model.arrays import LEAST_LOGPROB
from seer_core.ports.engine import ChunkJob
from seer_worker.sampling.controls import Controlled, control
from seer_worker.sampling.fused import chosen_by_key
from seer_worker.sampling.grammars import Grammars
from seer_worker.sampling.logit_row import LogitRow
from seer_worker.sampling.sending import read, sent

__all__ = ["LogitRecorder", "Sampler"]


class LogitRecorder:
    """Keeps the logits that tokens are chosen from, while they are asked for."""

    def __init__(self) -> None:
        self._rows: list[LogitRow] | None = None

    @property
    def on(self) -> bool:
        """Whether they are asked for."""
        return self._rows is not None

    def turn(self, on: bool) -> list[LogitRow]:
        """Begin or end to keep rows; return those kept so far."""
        kept, self._rows = self._rows, [] if on else None
        return kept or []

    def see(self, logits: Tensor, seeds: Tensor, positions: Tensor) -> None:
        """Keep these rows, if they are asked for."""
        if self._rows is not None:
            rows = zip(seeds.tolist(), positions.tolist(), logits.float().cpu().clone().numpy(), strict=True)
            self._rows += [LogitRow(*row) for row in rows]


class Sampler:
    """Chooses one token for each chunk of a batch."""

    def __init__(self, vocab_size: int, device: torch.device | str = "cpu") -> None:
        self.watch = LogitRecorder()
        self._device = device
        self._vocab_size = vocab_size

    def choose(
        self,
        logits: Tensor,
        jobs: Sequence[ChunkJob],
        positions: Sequence[int],
        text: Callable[[int], Sequence[int]] | None = None,
        ends: Collection[int] = (),
        grammars: Callable[[], Grammars] | None = None,
    ) -> tuple[list[int], list[float]]:
        """Return the next token of each chunk, and its log-prob in the model's own distribution.

        The host waits once for a device.

        Args:
            logits: one row for each chunk, [jobs, vocab].
            jobs: the chunks.
            positions: how many tokens each has so far, prompt included.
            text: returns these tokens, by the row; without it no sampling may change logits.
            ends: the tokens with which the model ends a response.
            grammars: returns those of the model; without it no sampling may have structured outputs.
        """
        places = sent(np.array(positions, dtype=np.int64), self._device)
        return self.choose_at(logits, jobs, places, text, ends, grammars)[:2]

    def choose_at(
        self,
        logits: Tensor,
        jobs: Sequence[ChunkJob],
        places: Tensor,
        text: Callable[[int], Sequence[int]] | None = None,
        ends: Collection[int] = (),
        grammars: Callable[[], Grammars] | None = None,
    ) -> tuple[list[int], list[float], list[int]]:
        """Do the same for positions where the logits are, int64 [jobs]; they come back with the tokens."""
        sampling = [job.sampling for job in jobs]
        top_k = [min(each.top_k, self._vocab_size) or self._vocab_size for each in sampling]
        seeds, highest = sent(np.array([[job.seed for job in jobs], top_k], dtype=np.int64), self._device)
        fractions = np.array([[each.temperature, each.top_p, each.min_p] for each in sampling], np.float32)
        temperature, top_p, min_p = sent(np.ascontiguousarray(fractions.T), self._device)
        self.watch.see(logits, seeds, places)
        controlled = control(logits, _controlled(jobs, text, ends), grammars)
        chosen, logprobs = chosen_by_key(
            controlled,
            temperature,
            highest if min(top_k) < self._vocab_size else None,
            top_p if any(each.top_p < 1 for each in sampling) else None,
            seeds,
            places,
            min_p if any(each.min_p for each in sampling) else None,
        )
        # Beside the most probable tokens a token's own log-prob comes from the same operation as theirs.
        if logprobs is None or controlled is not logits or any(each.top_logprobs for each in sampling):
            logprobs = logits.to(torch.float32).log_softmax(-1).gather(1, chosen[:, None])[:, 0]
        tokens, found, at = read(chosen, logprobs, places)
        return tokens.tolist(), found.tolist(), at.tolist()

    def most_probable(self, logits: Tensor, jobs: Sequence[ChunkJob]) -> list[list[tuple[int, float]]]:
        """Return as many of the most probable tokens as each chunk asks for, with their log-probs.

        Args:
            logits: one row for each chunk, [jobs, vocab].
            jobs: the chunks.
        """
        widths = [job.sampling.top_logprobs for job in jobs]
        asking = np.array([row for row, width in enumerate(widths) if width], dtype=np.int64)
        top = logits[sent(asking, self._device)].to(torch.float32).log_softmax(-1).topk(max(widths))
        found: list[list[tuple[int, float]]] = [[] for _ in jobs]
        values = top.values.clamp(min=LEAST_LOGPROB)
        for row, *pairs in zip(asking.tolist(), top.indices.tolist(), values.tolist(), strict=True):
            found[row] = list(zip(*pairs, strict=True))[: widths[row]]
        return found


def _controlled(
    jobs: Sequence[ChunkJob], text: Callable[[int], Sequence[int]] | None, ends: Collection[int]
) -> list[Controlled]:
    """Return the rows whose sampling changes logits."""
    found = []
    for row, job in enumerate(jobs):
        if job.sampling.changes_logits:
            if text is None:
                raise ValueError(f"this engine has no {', '.join(job.sampling.controls)}")
            stops = {*ends, *job.sampling.stop_token_ids}
            found.append(Controlled(row, job.sampling, job.context_tokens, text(row), stops, job.request_id))
    return found
