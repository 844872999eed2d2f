"""How long the steps of each instance took beside those of the others, with as many requests and contexts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import attrs
import numpy as np
import numpy.typing as npt

from seer_cli.report.lanes import InstanceLane
from seer_core.errors import printable

__all__ = ["SLOW", "StepPace", "pace_in_words", "paces_of"]

SLOW = 1.2
"""An instance whose steps take so many times as long as the others' at equal load is called slow."""
MORE = 1.1
"""So many times as much counts as more."""
ROUNDING = 1e-9
"""A fit is better by more than rounding if it leaves out this share less of the squares."""

Floats = npt.NDArray[np.float64]

STEPS, SECONDS, REQUESTS, CONTEXT, WHOLE_S = range(5)
"""Columns of the sums of ``InstanceLane.steps``."""


@attrs.frozen
class StepPace:
    """The steps of one instance beside those of the others."""

    ratio: float
    """How many times as long a request's step took as on the others, waits in a queue included."""
    slowness: float | None
    """The same at equal batches and contexts, without those waits; None where there were no such steps."""
    why: tuple[str, ...]
    """What made them longer, in words; empty where they were not, or for no known reason."""


def paces_of(lanes: Mapping[str, InstanceLane]) -> dict[str, StepPace]:
    """Return the pace of each instance that shared the run with others.

    Steps are compared where both have had similar batches and similar contexts, powers of two of the requests
    and of the tokens of KV.  Within these a step's time is taken to grow linearly with each, at the rates
    that fit the other instances best.
    """
    kinds = sorted({kind for lane in lanes.values() for kind in lane.steps})
    if not kinds:
        return {}
    row_of = {kind: row for row, kind in enumerate(kinds)}
    sums: dict[str, Floats] = {}
    everything = np.zeros((len(kinds), 5))
    for name, lane in lanes.items():
        own = sums[name] = np.zeros((len(kinds), 5))
        for kind, values in lane.steps.items():
            own[row_of[kind]] = values
        everything += own
    found = {}
    for name, own in sums.items():
        rest = np.maximum(everything - own, 0.0)
        mine, theirs = own.sum(axis=0), rest.sum(axis=0)
        if mine[STEPS] and theirs[STEPS]:
            slow = _slowness(own, rest)
            found[name] = StepPace(
                float(mine[WHOLE_S] / mine[STEPS] * theirs[STEPS] / max(theirs[WHOLE_S], 1e-12)),
                slow,
                _why(mine, theirs, slow),
            )
    return found


def _slowness(own: Floats, rest: Floats) -> float | None:
    """Return how many times as long steps took as those of the rest; None where no kind is in both."""
    both = (own[:, STEPS] > 0) & (rest[:, STEPS] > 0) & (rest[:, SECONDS] > 0)
    if not both.any():
        return None
    fit = _fit(rest[rest[:, STEPS] > 0])
    own, rest = own[both], rest[both]
    mine, theirs = (each[:, 1:] / each[:, :1] for each in (own, rest))
    requests, context = ((mine[:, at - 1], theirs[:, at - 1]) for at in (REQUESTS, CONTEXT))
    # No step grows faster than both its requests and its context do, as far off as the fit may be.
    ratios = [a / np.maximum(b, 1e-9) for a, b in (requests, context)]
    least = np.prod([np.minimum(each, 1.0) for each in ratios], axis=0)
    most = np.prod([np.maximum(each, 1.0) for each in ratios], axis=0)
    at_mine, at_theirs = (fit[0] + fit[1] * requests[side] + fit[2] * context[side] for side in (0, 1))
    growth = np.where(at_theirs > 0, at_mine / np.maximum(at_theirs, 1e-12), 1.0)
    expected = own[:, STEPS] * theirs[:, SECONDS - 1] * np.clip(growth, least, most)
    return float(own[:, SECONDS].sum() / max(expected.sum(), 1e-12))


def _fit(sums: Floats) -> Floats:
    """Return a step's constant time and its growth by request and by token of context, none negative.

    Of fits that differ by rounding alone, as all of a single kind do, the one with the fewest terms counts.
    """
    means = sums / sums[:, :1]
    columns = np.stack([np.ones(len(means)), means[:, REQUESTS], means[:, CONTEXT]], axis=1)
    times = means[:, SECONDS]
    # Relative errors count, by steps; scaled columns keep the equations well-conditioned.
    weights = np.sqrt(sums[:, STEPS]) / np.maximum(times, 1e-12)
    scale = np.maximum(columns.max(axis=0), 1e-12)
    left, right = columns / scale * weights[:, np.newaxis], times * weights
    rounding = ROUNDING * float(np.square(right).sum())
    best, error = np.zeros(3), np.inf
    for chosen in ([0], [1], [2], [0, 1], [0, 2], [1, 2], [0, 1, 2]):
        slopes = np.linalg.lstsq(left[:, chosen], right, rcond=None)[0]
        off = float(np.square(left[:, chosen] @ slopes - right).sum())
        if (slopes >= 0).all() and off < error - rounding:
            best, error = np.zeros(3), off
            best[chosen] = slopes
    slopes_of: Floats = best / scale
    return slopes_of


def _why(mine: Floats, theirs: Floats, slow: float | None) -> tuple[str, ...]:
    """Return what is different about an instance's steps that makes them long."""
    my, their = mine / mine[STEPS], theirs / theirs[STEPS]
    reasons = []
    if slow is not None and slow >= SLOW:
        reasons.append("it is slower")
    if my[WHOLE_S] * their[SECONDS] > MORE * their[WHOLE_S] * my[SECONDS]:
        reasons.append("its requests waited longer in its own queue")
    if my[REQUESTS] > MORE * their[REQUESTS]:
        reasons.append(f"its batches were larger ({my[REQUESTS]:,.1f} requests, not {their[REQUESTS]:,.1f})")
    own, others = (each[CONTEXT] / max(each[REQUESTS], 1e-9) for each in (my, their))
    if own > MORE * others:
        reasons.append(f"its contexts were longer ({own:,.0f} tokens, not {others:,.0f})")
    return tuple(reasons)


def pace_in_words(name: str, pace: StepPace) -> str:
    """Return a sentence about an instance whose steps took long, or nothing."""
    if max(pace.ratio, pace.slowness or 0.0) < SLOW:
        return ""
    why = f", because {_listed(pace.why)}" if pace.why and pace.ratio >= SLOW else ""
    text = f"Steps on {printable(name)} took {pace.ratio:.2f} times as long as on the others{why}."
    if pace.slowness is not None:
        text += f" At equal batches and contexts they took {pace.slowness:.2f} times as long."
    return text


def _listed(reasons: Sequence[str]) -> str:
    *some, last = reasons
    return f"{', '.join(some)} and {last}" if some else last
