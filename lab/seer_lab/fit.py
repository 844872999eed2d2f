"""The cost model of a measured engine, by least squares on its step times."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import median
from typing import NamedTuple

import msgspec
import numpy as np
from seer_cli.profiles import Profile
from seer_sim.cost import CostModel

from seer_core.errors import ConfigError
from seer_core.ports.drafting import LEAST_STEP_S, MOST_STEP_S

__all__ = ["Fit", "fit"]

NAMES = ("overhead_s", "request_s", "sampled_s", "position_s", "attention_s", "drafts_s")
"""What is fitted, all non-negative; ``attention_s`` is per position and token of context."""

FLOPS_PER_S = 1e12
"""Unit in which fitted seconds are written as FLOPs; any would do."""

ATTENTION_KNEES = (1, 2, 3, 4, 5, 7, 9, 13, 17)
"""Positions of a request up to which reading its KV, and not computing, may bound attention."""

FREE = 1e-18
"""Seconds per byte where nothing fitted is bound by reading."""


class Fit(msgspec.Struct, frozen=True):
    """A cost model, and how far its step times are from the measured ones, as shares of these.

    A step that verifies drafts takes ``drafts_s`` longer, however many they are.
    """

    cost: CostModel
    drafts_s: float
    median_error: float
    worst_error: float


class Cell(NamedTuple):
    """One measured step: ``size`` requests of ``context`` tokens, ``drafted`` draft tokens each."""

    size: int
    drafted: int
    context: int
    seconds: float


def fit(profile: Profile) -> Fit:
    """Return the cost model whose step times are nearest to the profile's, in relative least squares.

        T = overhead + request n + sampled n p + position max(knee, n p) + attention n (context + p) max(q, p)
            + drafts where p > 1

    for n requests of p positions each (1 and the draft tokens).  Both knees, where the weights' bytes and
    the KV's stop to bound a step, are found by trying all.  Where the instance says what prefilling a token
    takes, that is one more equation, for ``position``: such a position is computed and not sampled.

    Raises:
        ConfigError: the profile says nothing of the instance, or measured too few sizes.
    """
    info = profile.info
    cells = [
        Cell(size, drafted, table.context_tokens, seconds)
        for table in profile.tables
        for size, row in zip(table.batch, table.seconds, strict=True)
        for drafted, seconds in zip(table.draft_tokens, row, strict=True)
    ]
    if info is None or any(table.context_tokens == 0 for table in profile.tables):
        raise ConfigError(
            "the profile says nothing of its instance or its contexts; measure again:"
            " `seer profile CONFIG --context 64 --context 1024`"
        )
    if len({cell.size for cell in cells}) < 2 or len(profile.tables) < 2:
        raise ConfigError(
            "the profile has a single batch size or a single length of context; measure at least two of each:"
            " `seer profile CONFIG --context 64 --context 1024`"
        )
    measured = np.array([cell.seconds for cell in cells])
    prefill_s = info.prefill_s_per_token
    if prefill_s and not LEAST_STEP_S <= prefill_s <= MOST_STEP_S:
        raise ConfigError(
            f"the profile's prefill_s_per_token is {prefill_s:g}, which no engine takes; measure again:"
            " `seer profile CONFIG`"
        )
    best: tuple[float, tuple[int, int], np.ndarray] | None = None
    for knees in _knees(cells):
        rows = np.array([_features(cell, *knees) for cell in cells], float) / measured[:, None]
        if prefill_s > 0:
            rows = np.vstack([rows, [0, 0, 0, 1 / prefill_s, 0, 0]])
        solution, error = _non_negative(rows)
        if best is None or error < best[0] * (1 - 1e-6):
            best = error, knees, solution
    assert best is not None
    _, knees, solution = best
    modelled = np.array([_features(cell, *knees) for cell in cells], float) @ solution
    errors = np.abs(modelled / measured - 1).tolist()
    cost = _cost(solution, knees, info.kv_bytes_per_token)
    return Fit(cost, float(solution[-1]), median(errors), max(errors))


def _knees(cells: Sequence[Cell]) -> Iterator[tuple[int, int]]:
    """Yield pairs of knees: positions of a step, positions of a request."""
    positions = sorted({cell.size * (1 + cell.drafted) for cell in cells})
    most = 1 + max(cell.drafted for cell in cells)
    for step in (0, *positions[1:-2]):
        for request in ATTENTION_KNEES:
            if request <= most:
                yield step, request


def _features(cell: Cell, step_knee: int, request_knee: int) -> list[float]:
    """Return how often each of ``NAMES`` goes into a step."""
    each = 1 + cell.drafted
    positions = cell.size * each
    read = cell.size * (cell.context + each) * max(request_knee, each)
    return [1, cell.size, positions, max(step_knee, positions), read, cell.drafted > 0]


def _non_negative(rows: np.ndarray) -> tuple[np.ndarray, float]:
    """Return the x >= 0 for which the sum of ``(rows x - 1) ** 2`` is least, and that sum."""
    from scipy.optimize import nnls  # takes a second

    sizes = np.linalg.norm(rows, axis=0)  # they differ by orders of magnitude
    solution, residual = nnls(rows / np.where(sizes > 0, sizes, 1.0), np.ones(len(rows)))
    return solution / np.where(sizes > 0, sizes, 1.0), float(residual) ** 2


def _cost(solution: np.ndarray, knees: tuple[int, int], kv_bytes_per_token: int) -> CostModel:
    """Write what was fitted as constants of a ``CostModel``."""
    overhead_s, request_s, sampled_s, position_s, attention_s, _ = map(float, solution)
    step_knee, request_knee = knees
    kv_bytes = max(1, kv_bytes_per_token)
    byte_s = attention_s * request_knee / kv_bytes or FREE
    return CostModel(
        overhead_s=overhead_s,
        request_s=request_s,
        sampled_s=sampled_s,
        position_s=0.0,  # no measurement separates it from FLOPs
        weight_bytes=max(position_s * step_knee, FREE) / byte_s,
        expert_bytes=0.0,
        expert_share=1.0,
        kv_bytes_per_token=kv_bytes,
        flops_per_token=max(position_s * FLOPS_PER_S, 1e-9),
        attention_flops=attention_s * FLOPS_PER_S,
        prefill_attention_flops=0.0,  # in the measured prefill
        bytes_per_s=1 / byte_s,
        flops_per_s=FLOPS_PER_S,
        bandwidth_efficiency=1.0,
        compute_efficiency=1.0,
    )
