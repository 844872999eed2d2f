"""Measured times per output token, from a CSV file, and the step times behind them.

A serving benchmark keeps ``batch`` requests of ``prompt_tokens`` and ``response_tokens`` in flight.  Its time
per output token is the mean of steps that only decode and of steps that also compute the prompts of requests
that have taken the place of finished ones.
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple

from seer_host.tables import nearest
from seer_sim.cost import CostModel
from seer_sim.machines import GPUS, GpuPeaks, kv_tokens
from seer_sim.sizes import ModelSizes

from seer_core.errors import ConfigError, quote

__all__ = ["COLUMNS", "StepRow", "aside", "gpu_of", "read_rows", "token_s"]

COLUMNS = {
    "batch_size": "requests in flight",
    "isl": "tokens of a prompt",
    "osl": "tokens of a response",
    "tp_size": "GPUs that share each layer (optional: 1)",
    "tpot_ms": "milliseconds per output token after the first; also silicon_tpot_ms",
    "ttft_ms": "milliseconds to the first token (optional); also silicon_ttft_ms",
    "system": "the GPU, such as h100_sxm (optional: --gpu)",
}
"""Columns of a file, in AIConfigurator's names; others may be there, for --where."""

CHUNK_TOKENS = 8192
"""Tokens of prompts that one step computes: the default of vLLM's and SGLang's servers on these GPUs."""

WAITING = 0.5
"""The share of a batch that waits for its first token from which on a row does not measure its batch."""

CONTRADICTED = 0.95
"""A row is contradicted by one of the same conditions, of a batch no smaller, that takes less than so much of
its time."""


class StepRow(NamedTuple):
    """A measured row: ``seconds`` per output token, ``first_s`` to the first one (0 if unknown)."""

    batch: int
    prompt_tokens: int
    response_tokens: int
    gpus: int
    seconds: float
    first_s: float = 0.0

    @property
    def context(self) -> float:
        """The mean context of a request, in tokens."""
        return self.prompt_tokens + self.response_tokens / 2

    @property
    def waiting(self) -> float:
        """The share of the batch that waits for its first token, by Little's law."""
        return self.first_s / (self.first_s + self.response_tokens * self.seconds)


def read_rows(path: Path, where: Sequence[str] = ()) -> tuple[list[StepRow], str]:
    """Return the rows of a CSV file that ``where`` (KEY=VALUE) leaves, and the GPU that they name, or "".

    Rows whose layers are not shared by tensor parallelism alone (pipelines, data-parallel attention, experts
    on other GPUs than attention) are left out.

    Raises:
        ConfigError: a column is missing or no number, or rows are of several models or GPUs.
    """
    try:
        with path.open(newline="") as file:
            lines = list(csv.DictReader(file))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ConfigError(f"{path} cannot be read as CSV: {error}") from error
    for pair in where:
        key, equals, value = pair.partition("=")
        if not equals or (lines and key not in lines[0]):
            columns = ", ".join(lines[0]) if lines else "none"
            raise ConfigError(f"--where {quote(pair)}: give COLUMN=VALUE; the columns are {columns}")
        lines = [line for line in lines if line[key] == value]
    lines = [line for line in lines if _shared_alike(line)]
    if not lines:
        raise ConfigError(f"{path} has no rows of tensor parallelism that --where leaves")
    for key in ("model_path", "system"):
        if len(found := sorted({line.get(key) or "" for line in lines})) > 1:
            raise ConfigError(f"{path} has rows of several: {', '.join(found)}; choose: --where {key}=...")
    return [_row(path, line) for line in lines], lines[0].get("system") or ""


def gpu_of(name: str) -> GpuPeaks:
    """Return the peaks of a GPU by its name, such as h100 or h100_sxm.

    Raises:
        ConfigError: there is none.
    """
    short = name.lower().partition("_")[0]
    if short not in GPUS:
        raise ConfigError(
            f"--gpu {quote(name)}: no such GPU{nearest(short, GPUS)}; there are {', '.join(GPUS)}"
        )
    return GPUS[short]


def aside(rows: Sequence[StepRow], sizes: ModelSizes, gpu: GpuPeaks) -> Iterator[tuple[StepRow, str]]:
    """Yield the rows that do not measure a step of their batch, each with the reason.

    No row is judged by a fit.
    """
    for row in rows:
        if (room := kv_tokens(sizes, gpu, row.gpus)) < row.batch * row.context:
            yield row, f"its KV of {row.batch * row.context:,.0f} tokens exceeds some {max(0.0, room):,.0f}"
        elif row.waiting >= WAITING:
            yield row, f"{row.waiting:.0%} of its batch wait for the first token"
        elif any(_contradicts(other, row) for other in rows):
            yield row, "a batch no smaller takes less time"


def token_s(cost: CostModel, row: StepRow, seen: float = 1.0) -> float:
    """Return the seconds per output token of a row.

    While a response is written, each of the others is replaced once, and its prompt is computed in chunks
    beside the decoding.  ``seen`` is the share of these prompts that falls between the response's tokens: 1
    where requests come in evenly, less where they come in together, so that prompts are computed while all
    wait for the first token.
    """
    others = seen * (row.batch - 1) / row.response_tokens
    mixed = min(1.0, others * ceil(row.prompt_tokens / CHUNK_TOKENS))
    seconds = cost.pass_s(row.batch, row.batch, row.batch)
    if mixed:
        positions = row.batch + others * row.prompt_tokens / mixed
        seconds += mixed * (cost.pass_s(positions, row.batch, row.batch) - seconds)
        seconds += others * cost.prefill_attention_s(0, row.prompt_tokens)
    return seconds + row.batch * row.context * cost.attention_s(1)


def _contradicts(other: StepRow, row: StepRow) -> bool:
    same = other[1:4] == row[1:4] and other.waiting < WAITING
    return same and other.batch >= row.batch and other.seconds < CONTRADICTED * row.seconds


def _shared_alike(line: Mapping[str, str]) -> bool:
    gpus = _number(line, ("tp_size",), 1)
    if any(_number(line, (key,), 1) > 1 for key in ("pp_size", "attention_dp_size")):
        return False
    experts = _number(line, ("moe_tp_size",), 1) * _number(line, ("moe_ep_size",), 1)
    return experts in (0, 1, gpus)


def _row(path: Path, line: Mapping[str, str]) -> StepRow:
    try:
        row = StepRow(
            int(_number(line, ("batch_size",))),
            int(_number(line, ("isl",))),
            int(_number(line, ("osl",))),
            int(_number(line, ("tp_size",), 1)),
            _number(line, ("tpot_ms", "silicon_tpot_ms")) / 1e3,
            _number(line, ("ttft_ms", "silicon_ttft_ms"), 0) / 1e3,
        )
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"{path}: a row has no number for {error}; its columns are {', '.join(COLUMNS)}"
        ) from error
    if min(row[:5]) <= 0 or row.first_s < 0:
        raise ConfigError(
            f"{path}: a row has {dict(row._asdict())}; all but the first token's time are above 0"
        )
    return row


def _number(line: Mapping[str, str], keys: Iterable[str], otherwise: float | None = None) -> float:
    for key in keys:
        if line.get(key):
            return float(line[key])
    if otherwise is None:
        raise KeyError(next(iter(keys)))
    return otherwise
