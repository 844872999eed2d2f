"""Micro-batches: samples laid out as rows of tokens, so many tokens at a time."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import compress

import attrs
import torch
from seer_host.images import PromptImage
from torch import Tensor

from seer_rl.trainer import Sample

__all__ = ["LaidImage", "MicroBatch", "micro_batches"]


@attrs.frozen
class LaidImage:
    """An image whose tokens stand in a row, from ``begin`` to ``end``."""

    image: PromptImage
    row: int
    begin: int
    end: int


@attrs.frozen(eq=False)
class MicroBatch:
    """Samples as one tensor.  ``ids`` and ``positions``, int64, and ``mask`` are [rows, width].

    The mask holds where a trained token of a response stands: the n tokens whose log-probs enter the loss,
    row by row.  ``advantages`` and ``engine_logprobs`` are theirs, float32 [n].  ``experts``, int64 [rows,
    width, layers, experts per token], are those that the engine took, -1 where it took none.  ``images`` are
    in the order of rows and places.
    """

    ids: Tensor
    positions: Tensor
    mask: Tensor
    advantages: Tensor
    engine_logprobs: Tensor
    experts: Tensor | None = None
    images: Sequence[LaidImage] = ()

    def trained(self, per_place: Tensor) -> Tensor:
        """Select values that predict the trained tokens, [n, ...], of one per place: [rows, width, ...]."""
        return per_place[:, :-1][self.mask[:, 1:]]

    def same_tokens(self, other: MicroBatch) -> bool:
        """Return whether another has the same tokens and images at the same places."""
        mine, others = (self.ids, self.positions, self.mask), (other.ids, other.positions, other.mask)
        same = all(torch.equal(one, another) for one, another in zip(mine, others, strict=True))
        return same and list(self.images) == list(other.images)

    @property
    def targets(self) -> Tensor:
        """The trained tokens, [n]."""
        return self.ids[self.mask]


def micro_batches(samples: Sequence[Sample], limit_tokens: int, *, packed: bool) -> list[MicroBatch]:
    """Lay samples out, the longest first, in micro-batches of at most so many tokens, padding included.

    A sample longer than that has one of its own.  Padded, each has a row, with zeros on its right.  Packed,
    all stand in one row, and the model finds their ends by the positions, which begin anew with each.
    """
    batches: list[list[Sample]] = []
    room = 0
    for sample in sorted(samples, key=_tokens, reverse=True):  # stable: ties stay in submission order
        # Padded to the first, which is the longest.
        needed = _tokens(sample) if packed or not batches else _tokens(batches[-1][0])
        if needed > room:
            batches.append([])
            needed = _tokens(sample)
            room = max(limit_tokens, needed)
        batches[-1].append(sample)
        room -= needed
    return [_layout(batch, packed) for batch in batches]


def _tokens(sample: Sample) -> int:
    return len(sample.prompt) + len(sample.response)


def _layout(samples: Sequence[Sample], packed: bool) -> MicroBatch:
    width = sum(map(_tokens, samples)) if packed else max(map(_tokens, samples))
    rows = 1 if packed else len(samples)
    ids = torch.zeros(rows, width, dtype=torch.int64)
    positions = torch.arange(width).repeat(rows, 1)
    mask = torch.zeros(rows, width, dtype=torch.bool)
    images: list[LaidImage] = []
    begin = 0
    for number, sample in enumerate(samples):
        row, end = 0 if packed else number, begin + _tokens(sample)
        ids[row, begin:end] = torch.tensor([*sample.prompt, *sample.response])
        positions[row, begin:end] = torch.arange(end - begin)
        trained = mask[row, begin + len(sample.prompt) : end]
        trained[:] = True if sample.loss_mask is None else torch.tensor(list(sample.loss_mask)).bool()
        if sample.images is not None:
            laid = sample.images.placed()
            images += [LaidImage(each, row, begin + at, begin + at + count) for each, at, count in laid]
        begin = end if packed else 0
    sizes = torch.tensor([sample.trained_tokens for sample in samples])
    advantages = torch.tensor([sample.advantage for sample in samples], dtype=torch.float32)
    logprobs = [logprob for sample in samples for logprob in _trained_logprobs(sample)]
    return MicroBatch(
        ids,
        positions,
        mask,
        advantages.repeat_interleave(sizes),
        torch.tensor(logprobs, dtype=torch.float32),
        _experts(samples, rows, width, packed),
        images,
    )


def _experts(samples: Sequence[Sample], rows: int, width: int, packed: bool) -> Tensor | None:
    """Lay out the experts that the engine took, if samples have them."""
    chosen = [sample.routed_experts for sample in samples]
    if chosen[0] is None:
        return None
    experts = torch.full((rows, width, *chosen[0].shape[1:]), -1, dtype=torch.int64)
    begin = 0
    for number, (sample, each) in enumerate(zip(samples, chosen, strict=True)):
        assert each is not None
        experts[0 if packed else number, begin : begin + len(each)] = torch.from_numpy(each.astype("int64"))
        begin += _tokens(sample) if packed else 0
    return experts


def _trained_logprobs(sample: Sample) -> Iterable[float]:
    return sample.logprobs if sample.loss_mask is None else compress(sample.logprobs, sample.loss_mask)
