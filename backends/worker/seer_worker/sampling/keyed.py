"""Keyed sampling: the token at a position depends on (seed, position, logits) and on nothing else.

    token = argmax(logits / temperature after top-k and top-p + Gumbel(seed, position, token))

The Gumbel-max trick (Gumbel 1954; Maddison et al. 2014, arXiv:1411.0030) draws exactly from the
softmax of its argument, so keyed sampling has the distribution of ordinary sampling.  The position is
the number of tokens before the sampled one, prompt included.  So a response is the same with any
chunks, its batch, its instance, and however often it was preempted or moved.

``noise`` makes the noise.  Top-p adds integers, so neither its cut nor anything else of a row depends on the
number of rows, or on the order in which a device adds.  ``choice`` takes kernels in place of what is here
on a GPU with Triton.

Drafts are verified by the same rule: every row of logits, whether it follows a draft token or a settled
one, is sampled by key at its own position; a draft is accepted exactly when it is the token so sampled, and
the first that is not ends the row.  So drafts change how many steps a response takes, and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from seer_worker.sampling.noise import ROUGH, gumbel, logarithm, mass, noise_steps, rough_gumbel, steps_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Ints = NDArray[np.int64]

__all__ = [
    "PLACEHOLDER",
    "cut",
    "keyed_choices",
    "keyed_scores",
    "least_by_min_p",
    "rows_at_once",
    "verify",
]

GREEDY_BELOW = 1e-5
CPU_BLOCK = 1 << 15
"""Logits sampled at a time on a CPU: their noise, eight bytes each while it is hashed, stays in the cache."""
GPU_BLOCK = 1 << 26
PLACEHOLDER = -1


def cut(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    min_p: Tensor | None = None,
) -> Tensor:
    """Set logits outside min-p, then outside top-k, then outside top-p of what is left, to -inf.

    The cut is a value, never an index: equal logits stay or go together, so the result does not
    depend on how a sort breaks ties.  A logit is within top-p if the probabilities of those above it add up
    to less.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: integer [rows], ``vocab`` for no limit, or None.
        top_p: float32 [rows], 1 for no limit, or None.
        min_p: float32 [rows], the least share of the highest probability, 0 for no limit, or None.
    """
    if min_p is not None:
        least = least_by_min_p(logits.amax(dim=-1), temperature, min_p)
        logits = logits.masked_fill(logits < least[:, None], -torch.inf)
    if top_k is None and top_p is None:
        return logits
    ranked = logits.sort(dim=-1, descending=True).values
    if top_k is not None:
        least = ranked.gather(1, top_k.to(torch.int64)[:, None] - 1)
        ranked = ranked.masked_fill(ranked < least, -torch.inf)
        logits = logits.masked_fill(logits < least, -torch.inf)
    if top_p is not None:
        masses = _masses(ranked, ranked[:, :1], temperature)
        upto = masses.cumsum(dim=-1)
        limit = (upto[:, -1].double() * top_p.double()).clamp_(min=1.0)
        within = ((upto - masses).double() < limit[:, None]).sum(dim=-1, keepdim=True)
        least = ranked.gather(1, within - 1)
        logits = logits.masked_fill((logits < least) & (top_p[:, None] < 1), -torch.inf)
    return logits


def least_by_min_p(highest: Tensor, temperature: Tensor, min_p: Tensor) -> Tensor:
    """Return the least logit of each row that min-p leaves, float32 [rows]."""
    shares = logarithm(min_p.clamp(min=torch.finfo(torch.float32).tiny))
    return torch.where(min_p > 0, highest + temperature * shares, -torch.inf)


def keyed_scores(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    noise: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return that of which the chosen token has most, float32 [rows, vocab]; temperature 0 has no noise.

    Args:
        logits: float32 [rows, vocab].
        temperature: float32 [rows].
        top_k: as ``cut`` takes it.
        top_p: likewise.
        noise: ``gumbel`` of the rows, which is changed.
        min_p: as ``cut`` takes it.
    """
    noise = noise.masked_fill_((temperature < GREEDY_BELOW)[:, None], 0.0)
    return noise.add_(cut(logits, temperature, top_k, top_p, min_p) * _inverse(temperature)[:, None])


def keyed_choices(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None = None,
) -> Tensor:
    """Return the chosen token ids, int64 [rows]: as many rows at a time as suit the device.

    Args:
        logits: float32, or a shorter type, [rows, vocab].
        temperature: float32 [rows]; a row below ``GREEDY_BELOW`` is greedy.
        top_k: as ``cut`` takes it.
        top_p: likewise.
        seeds: the requests' own, int64 [rows].
        positions: how many tokens stand before each row's, int64 [rows].
        min_p: as ``cut`` takes it.
    """
    rows, vocab = logits.shape
    block = max(1, _block(logits.device) // vocab)
    choose = _chosen_on_cpu if logits.device.type == "cpu" else _chosen
    columns = temperature, top_k, top_p, seeds, positions, min_p
    chosen = [
        choose(
            logits[part].to(torch.float32),
            *(None if values is None else values[part] for values in columns),  # type: ignore[arg-type]
        )
        for part in (slice(start, start + block) for start in range(0, rows, block))
    ]
    return chosen[0] if len(chosen) == 1 else torch.cat(chosen)


def _chosen(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None,
) -> Tensor:
    noise = gumbel(seeds, positions, noise_steps(logits.shape[1], logits.device))
    return keyed_scores(logits, temperature, top_k, top_p, noise, min_p).argmax(dim=-1)


def _chosen_on_cpu(
    logits: Tensor,
    temperature: Tensor,
    top_k: Tensor | None,
    top_p: Tensor | None,
    seeds: Tensor,
    positions: Tensor,
    min_p: Tensor | None,
) -> Tensor:
    """Return the same: candidates by rough noise, and only where a row has several the noise itself.

    The best token of a row is that of its cut, if it is within it; else the best one of those above is the
    next to be tried.  So nothing is sorted; top-p of what top-k leaves takes the highest k.

    By numpy, whose operations begin in a third of the time: with a small vocabulary that is most of it.
    """
    if min_p is not None:
        logits = cut(logits, temperature, None, None, min_p)
    if top_k is not None and top_p is not None:
        highest = logits.topk(int(top_k.max())).values
        least = highest.gather(1, top_k.to(torch.int64)[:, None] - 1)
        logits = logits.masked_fill(logits < least, -torch.inf)
    temperatures = temperature.numpy()
    greedy = temperatures < GREEDY_BELOW
    raw = logits.numpy()
    scaled = raw * np.reciprocal(np.where(greedy, np.float32(1), temperatures))[:, None]
    rough = rough_gumbel(seeds.numpy(), positions.numpy(), noise_steps(logits.shape[1]).numpy())
    if greedy.any():
        rough[greedy] = 0.0
    np.add(rough, scaled, out=rough)
    chosen = _best(rough, scaled, seeds, positions, greedy)
    if top_k is None and top_p is None:
        return torch.from_numpy(chosen)
    if top_p is not None:
        masses = _masses(logits, logits.amax(dim=-1, keepdim=True), temperature).numpy()
        limits = np.maximum(masses.sum(-1).astype(np.float64) * top_p.numpy(), 1.0)
        limits[top_p.numpy() >= 1] = np.inf
    else:
        assert top_k is not None
        masses, limits = None, top_k.numpy()
    rows = np.arange(len(raw))
    while True:
        above = raw[rows] > raw[rows, chosen[rows]][:, None]
        shares = above.sum(-1) if masses is None else np.where(above, masses[rows], 0).sum(-1)
        outside = shares >= limits[rows]
        rows, above = rows[outside], above[outside]
        if not len(rows):
            return torch.from_numpy(chosen)
        part = torch.from_numpy(rows)
        left = np.where(above, rough[rows], -np.inf)
        chosen[rows] = _best(left, scaled[rows], seeds[part], positions[part], greedy[rows])


def _best(
    rough: NDArray[np.float32],
    scaled: NDArray[np.float32],
    seeds: Tensor,
    positions: Tensor,
    greedy: NDArray[np.bool_],
) -> Ints:
    """Return which token of each row has most, by noise where rough scores do not decide."""
    chosen: Ints = rough.argmax(axis=-1)
    best = rough[np.arange(len(rough)), chosen]
    # A sum rounds to one of two neighbours, which for a large one are further apart than the noise is rough.
    with np.errstate(invalid="ignore"):  # the logits are the model's
        near = rough >= (best - (2 * ROUGH + np.abs(best) * 1e-6))[:, None]
    if np.count_nonzero(near) == len(near):
        return chosen
    rows, tokens = (torch.from_numpy(each) for each in near.nonzero())
    noise = gumbel(seeds[rows], positions[rows], steps_of(tokens)[:, None])[:, 0]
    noise.masked_fill_(torch.from_numpy(greedy)[rows], 0.0)
    scores = torch.full(rough.shape, -torch.inf)
    scores[rows, tokens] = noise.add_(torch.from_numpy(scaled)[rows, tokens])
    found: Ints = scores.argmax(dim=-1).numpy()
    return found


def _masses(logits: Tensor, highest: Tensor, temperature: Tensor) -> Tensor:
    """Return what each logit weighs in top-p, int64 [rows, vocab]."""
    below = logits - highest.masked_fill(highest == -torch.inf, 0.0)
    return mass(below.mul_(_inverse(temperature)[:, None]))


def rows_at_once(logits: Tensor) -> int:
    """Return how many rows of these ``verify`` should have sampled together."""
    return max(1, 4 * _block(logits.device) // logits.shape[1])


def _inverse(temperature: Tensor) -> Tensor:
    return torch.where(temperature < GREEDY_BELOW, 1.0, temperature).reciprocal()


def _block(device: torch.device) -> int:
    return CPU_BLOCK if device.type == "cpu" else GPU_BLOCK


def verify(
    choose: Callable[[Ints], Ints], counts: Ints, drafts: Ints, last: Ints, rows_at_once: int
) -> tuple[Ints, Ints]:
    """Follow each request's drafts as far as they are what is sampled.

    A request ends with the first token that is not its draft, with the token after its last draft, or with
    one that ends responses.

    Args:
        choose: samples rows of logits, given by ascending index.
        counts: drafts per request.  Request i has ``counts[i] + 1`` rows of logits.
        drafts: all draft tokens, request by request.
        last: tokens that end a response; what follows them is not looked at.
        rows_at_once: rows sampled together before it is clear which of them count.  Few: no work is wasted
            on rows behind a mismatch.  Many: fewer and larger calls of ``choose``.

    Returns:
        The token sampled in each row, and how many of its rows each request keeps.
    """
    rows = counts + 1
    ends = np.cumsum(rows)
    first = ends - rows
    drafted = np.ones(ends[-1], dtype=np.bool_)
    drafted[ends - 1] = False
    wanted = np.full(ends[-1], PLACEHOLDER, dtype=np.int64)
    wanted[drafted] = drafts
    sampled = np.full(ends[-1], PLACEHOLDER, dtype=np.int64)
    kept = np.zeros_like(counts)
    going, start = np.arange(len(counts)), 0
    while len(going):
        many = max(rows_at_once // len(going), 1)
        sizes = np.minimum(rows[going] - start, many)
        stops = np.cumsum(sizes)
        starts = stops - sizes
        part = np.repeat(first[going] + start - starts, sizes) + np.arange(stops[-1])
        found = choose(part)
        sampled[part] = found
        goes_on = found == wanted[part]
        for token in last:
            goes_on &= found != token
        # The first row of each request that does not go on; the end of all rows where there is none.
        halts = np.append(np.flatnonzero(~goes_on), stops[-1])
        halt = halts[np.searchsorted(halts, starts)]
        kept[going] += np.minimum(halt + 1 - starts, sizes)
        going, start = going[halt >= stops], start + many
    return sampled, kept
