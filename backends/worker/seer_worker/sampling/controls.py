"""Changes of logits by a request's sampling, before a token is drawn by temperature, min-p, top-k and top-p.

The rules and their order are vLLM's: structured outputs, allowed tokens, bad words, ``min_tokens``, biases,
and penalties.  They depend on the logits, the prompt and the response's tokens before the position,
and on nothing else, so a response is the same with any chunks, batch and drafts.

Where the rules leave no token, all but structured outputs and ``allowed_token_ids`` are void at that
position.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np
import torch
from torch import Tensor

from seer_core.model import Sampling

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from seer_worker.sampling.grammars import Grammars

__all__ = ["Controlled", "control"]


@attrs.frozen(eq=False)
class Controlled:
    """A row of logits whose request's sampling changes them.

    ``token_ids`` are all tokens before the position, of which the first ``prompt_tokens`` are the prompt's,
    or stand before the turn; ``ends`` are the tokens that end the response; ``request_id`` is its request's.
    """

    row: int
    sampling: Sampling
    prompt_tokens: int
    token_ids: Sequence[int] | NDArray[np.integer]
    ends: Collection[int]
    request_id: str = ""


def control(
    logits: Tensor, rows: Sequence[Controlled], grammars: Callable[[], Grammars] | None = None
) -> Tensor:
    """Return logits with these rows changed, float32 [rows, vocab], or the given ones where there are none.

    ``grammars`` returns those of the model, for rows with structured outputs.
    """
    if not rows:
        return logits
    logits = logits.to(torch.float32, copy=True)
    for each in rows:
        _control(logits[each.row], each, grammars)
    return logits


def _control(logits: Tensor, row: Controlled, grammars: Callable[[], Grammars] | None) -> None:
    """Change a row, [vocab], in place."""
    sampling = row.sampling
    token_ids = np.asarray(row.token_ids, dtype=np.int64)
    written = token_ids[row.prompt_tokens :]
    if sampling.structured_outputs is not None:
        assert grammars is not None
        form = sampling.structured_outputs
        grammars().mask(logits, form, row.request_id, written.tolist(), row.ends)
    if sampling.allowed_token_ids:
        allowed = _index(sampling.allowed_token_ids, logits)
        kept = logits[allowed]
        logits.fill_(-torch.inf)[allowed] = kept
    barred = [
        last for *begun, last in sampling.bad_words if written[len(written) - len(begun) :].tolist() == begun
    ]
    if len(written) < sampling.min_tokens:
        barred += row.ends
    before = logits.clone() if barred else None
    if barred:
        logits[_index(barred, logits)] = -torch.inf
    if sampling.logit_bias:
        biases = torch.tensor([*sampling.logit_bias.values()], dtype=torch.float32, device=logits.device)
        logits[_index(sampling.logit_bias, logits)] += biases
    _penalize(logits, sampling, token_ids, written)
    if before is not None:
        logits.copy_(torch.where(torch.isneginf(logits.max()), before, logits))


def _penalize(
    logits: Tensor, sampling: Sampling, token_ids: NDArray[np.int64], written: NDArray[np.int64]
) -> None:
    if sampling.repetition_penalty != 1.0:
        seen = _index(np.flatnonzero(np.bincount(token_ids)), logits)
        found = logits[seen]
        divided, multiplied = found / sampling.repetition_penalty, found * sampling.repetition_penalty
        logits[seen] = torch.where(found > 0, divided, multiplied)
    if sampling.frequency_penalty or sampling.presence_penalty:
        counts = np.bincount(written, minlength=1)
        there = np.flatnonzero(counts)
        times = torch.from_numpy(counts[there].astype(np.float32)).to(logits.device)
        logits[_index(there, logits)] -= sampling.frequency_penalty * times + sampling.presence_penalty


def _index(token_ids: Collection[int] | NDArray[np.int64], logits: Tensor) -> Tensor:
    if not isinstance(token_ids, np.ndarray):
        token_ids = np.fromiter(token_ids, dtype=np.int64)
    return torch.from_numpy(token_ids).to(logits.device)
