"""The shares of a GPU's peaks that engines reach, fitted to measured times per output token."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray
from seer_sim.machines import TYPICAL, GpuPeaks, Reached, cost_on
from seer_sim.sizes import ModelSizes

from seer_core.errors import ConfigError
from seer_lab.step_rows import StepRow, token_s

__all__ = ["Errors", "Held", "StepFit", "errors_of", "fit_steps", "held_out"]

Floats = NDArray[np.float64]

SPREAD: Mapping[str, float] = {
    "host_s": 1.0,
    "layer_s": 1.0,
    "reduce_s": 1.0,
    "request_s": 1.0,
    "mixture_s": 1.0,
    "routing_s": 2.0,
    "weights": 0.5,
    "experts": 0.7,
    "kv": 0.7,
    "compute": 0.4,
    "expert_compute": 0.7,
    "attention": 0.7,
    "link": 0.7,
    "seen": 0.5,
}
"""How far each constant may be from ``TYPICAL``: a standard deviation of its logarithm.  What rows do not say
stays typical, so that a fit to few of them still predicts others."""

NOISE = 0.03
"""The relative error of a row that counts as one standard deviation; larger ones count by their size and not
their square."""

AT_MOST = {"weights": 1.0, "compute": 1.0, "seen": 1.25}
"""Shares that cannot be more, and a bit above 1 for prompts that come in unevenly."""

CLEARLY = 0.7
"""Reading all experts is believed where it explains rows so much better."""

LEAST_ROWS = 4


class StepFit(msgspec.Struct, frozen=True):
    """The shares reached, and the part of others' prompts that the benchmark lets a response wait for."""

    reached: Reached
    seen: float

    def token_s(self, sizes: ModelSizes, gpu: GpuPeaks, row: StepRow) -> float:
        """Return the predicted seconds per output token of a row."""
        return token_s(cost_on(sizes, gpu, row.gpus, self.reached), row, self.seen)


class Errors(msgspec.Struct, frozen=True):
    """Predicted over measured, less 1, without signs."""

    rows: int
    mean: float
    worst: float


class Held(msgspec.Struct, frozen=True):
    """Rows that were left out of a fit, and how far their predictions are off."""

    what: str
    errors: Errors


def fit_steps(rows: Sequence[StepRow], sizes: ModelSizes, gpu: GpuPeaks, start: Reached = TYPICAL) -> StepFit:
    """Return the constants that explain the rows best, and are near ``start`` where rows say nothing.

    Raises:
        ConfigError: there are too few rows.
    """
    from scipy.optimize import least_squares  # a third of a second

    if len(rows) < LEAST_ROWS:
        raise ConfigError(f"{len(rows)} rows are left to fit; give {LEAST_ROWS} at least")
    names = list(SPREAD)
    typical = {**msgspec.structs.asdict(start), "seen": 1.0}
    center = np.log([typical[name] for name in names])
    spread = np.array([SPREAD[name] for name in names])
    limits = np.log([AT_MOST.get(name, np.inf) for name in names])
    measured = np.log([row.seconds for row in rows])

    def residuals(logarithms: Floats, reads_all: bool) -> Floats:
        found = _fit_of(names, logarithms, reads_all)
        costs = {gpus: cost_on(sizes, gpu, gpus, found.reached) for gpus in {row.gpus for row in rows}}
        predicted = np.log([token_s(costs[row.gpus], row, found.seen) for row in rows])
        off = (predicted - measured) / NOISE
        off = np.sign(off) * np.sqrt(2 * (np.sqrt(1 + off**2) - 1))
        return np.concatenate([off, (logarithms - center) / spread])

    begin = np.minimum(center, limits - 1e-3)
    best: tuple[float, StepFit] | None = None
    for reads_all in (False, True)[: 2 if sizes.experts else 1]:
        found = least_squares(
            residuals, begin, bounds=(-np.inf, limits), x_scale=spread, kwargs={"reads_all": reads_all}
        )
        if best is None or found.cost < CLEARLY * best[0]:
            best = found.cost, _fit_of(names, found.x, reads_all)
    assert best is not None
    return best[1]


def errors_of(fit: StepFit, rows: Sequence[StepRow], sizes: ModelSizes, gpu: GpuPeaks) -> Errors:
    """Return how far predictions are off."""
    off = [abs(fit.token_s(sizes, gpu, row) / row.seconds - 1) for row in rows]
    return Errors(len(off), sum(off) / len(off), max(off))


def held_out(rows: Sequence[StepRow], sizes: ModelSizes, gpu: GpuPeaks) -> Iterator[Held]:
    """Yield the errors on each half by a fit to the other, and on each number of GPUs by one to the others.

    A half is every second row, ordered by GPUs, prompt, response and batch; repeated rows are in one half.
    """
    conditions = sorted({(row.gpus, *row[1:3], row.batch) for row in rows})
    for half in (0, 1):
        mine = set(conditions[half::2])
        test = [row for row in rows if (row.gpus, *row[1:3], row.batch) in mine]
        train = [row for row in rows if (row.gpus, *row[1:3], row.batch) not in mine]
        if len(train) >= LEAST_ROWS and test:
            yield Held(f"half {half + 1}", errors_of(fit_steps(train, sizes, gpu), test, sizes, gpu))
    sizes_of_groups = sorted({row.gpus for row in rows})
    for gpus in sizes_of_groups:
        test = [row for row in rows if row.gpus == gpus]
        train = [row for row in rows if row.gpus != gpus]
        if len(train) >= LEAST_ROWS:
            found = errors_of(fit_steps(train, sizes, gpu), test, sizes, gpu)
            yield Held(f"{gpus} GPU{'s' if gpus > 1 else ''}", found)


def _fit_of(names: Sequence[str], logarithms: Floats, reads_all: bool) -> StepFit:
    values: dict[str, Any] = dict(zip(names, np.exp(logarithms).tolist(), strict=True))
    seen = values.pop("seen")
    return StepFit(Reached(**values, reads_all=reads_all), seen)
