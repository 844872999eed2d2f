"""The paper's tables and figures, row by row: what it says, and what to take from simulations instead."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Literal

import msgspec
from seer_sim.acceptance import Acceptance

from seer_lab.paper import numbers
from seer_lab.paper.runs import PaperArm, Runs, arm_of, mean, ratio

__all__ = ["ROWS", "TABLES", "Kind", "PaperRow"]

Kind = Literal["fitted", "given", "predicted"]
"""Constants were chosen so that it comes out; it was put in; or neither."""


class PaperRow(msgspec.Struct, frozen=True):
    """One number of the paper, and how to get ours from the simulations of ``arms``.

    ``form`` is how both are shown.
    """

    table: str
    workload: str
    name: str
    paper: float
    arms: tuple[PaperArm, ...]
    of: Callable[[Runs], float]
    form: str = ".2f"
    kind: Kind = "predicted"


TABLES: Mapping[str, str] = {
    "end-to-end": "Total and tail time of an iteration, seconds",
    "ablation": "Throughput over veRL's, technique after technique",
    "group-sizes": "Throughput over veRL's, by group size",
    "speculation": "Speculation alone on veRL: throughput over veRL's, and mean acceptance length",
    "length-context": "What knowing lengths is worth: throughput and tail time over veRL's",
    "partial": "Seer's throughput over that of partial rollout, in tokens of responses that are over",
    "verl": "What veRL loses",
    "acceptance": "Mean acceptance length of grouped drafts, by finished siblings and paths",
}
"""By the name under which ``seer reproduce`` runs them."""

QWEN = "qwen2-vl-72b"


def _figure(
    table: str, arm: PaperArm, name: str, paper: float, figure: str, form: str, kind: Kind = "predicted"
) -> PaperRow:
    return PaperRow(
        table, arm.workload, name, paper, (arm,), lambda runs: mean(runs, arm, figure), form, kind
    )


def _ratio(
    table: str,
    arm: PaperArm,
    base: str,
    name: str,
    paper: float,
    figure: str = "throughput",
    form: str = ".2f",
) -> PaperRow:
    other = PaperArm(arm.workload, base, arm.group_size)
    return PaperRow(
        table, arm.workload, name, paper, (other, arm), lambda runs: ratio(runs, arm, other, figure), form
    )


def _end_to_end() -> list[PaperRow]:
    rows = []
    for workload, times in numbers.TIMES.items():
        for policy, (total_s, tail_s) in times.items():
            kind: Kind = "fitted" if policy == "verl" else "predicted"
            for name, paper in (("total", total_s), ("tail", tail_s)):
                arm = PaperArm(workload, policy)
                rows.append(
                    _figure("end-to-end", arm, f"{policy} {name}", paper, f"{name}_time_s", ",.0f", kind)
                )
    return rows


def _ablation() -> list[PaperRow]:
    return [
        _ratio("ablation", PaperArm(workload, policy), "verl", policy, paper)
        for workload, ratios in numbers.ABLATION.items()
        for policy, paper in ratios.items()
    ]


def _group_sizes() -> list[PaperRow]:
    return [
        _ratio("group-sizes", arm_of(workload, policy, size), "verl", f"{policy}, groups of {size}", paper)
        for size, workloads in numbers.GROUP_SIZES.items()
        for workload, ratios in workloads.items()
        for policy, paper in ratios.items()
    ]


def _speculation() -> list[PaperRow]:
    rows = []
    for workload, policies in numbers.SPECULATION.items():
        for policy, (speed_up, length) in policies.items():
            arm = PaperArm(workload, policy)
            rows.append(_ratio("speculation", arm, "verl", policy, speed_up))
            rows.append(
                _figure(
                    "speculation", arm, f"{policy}, acceptance", length, "acceptance_length", ".2f", "given"
                )
            )
    return rows


def _length_context() -> list[PaperRow]:
    rows = []
    for policy, (throughput, tail) in numbers.LENGTH_CONTEXT.items():
        arm = PaperArm(QWEN, policy)
        rows.append(_ratio("length-context", arm, "verl", policy, throughput))
        rows.append(_ratio("length-context", arm, "verl", f"{policy}, tail time", tail, "tail_time_s"))
    return rows


def _partial() -> list[PaperRow]:
    seer = PaperArm(QWEN, "seer")
    name = "seer over partial rollout"
    return [_ratio("partial", seer, "partial", name, numbers.PARTIAL, "kept_throughput")]


def _verl() -> list[PaperRow]:
    verl = PaperArm(QWEN, "verl")
    named = {
        "preemptions": ("preemptions", ",.0f"),
        "idle_share": ("instances idle", ".0%"),
        "late_start": ("mean start of the last 5 %", ".0%"),
    }
    return [
        _figure("verl", verl, name, numbers.VERL[figure], figure, form, "fitted")
        for figure, (name, form) in named.items()
    ]


def _always(value: float) -> Callable[[Runs], float]:
    return lambda runs: value


def _acceptance() -> list[PaperRow]:
    rows = []
    for paths, lengths in numbers.ACCEPTANCE.items():
        model = Acceptance(paths=paths)
        for siblings, paper in lengths.items():
            tokens = 1 + sum(model.table()[model.row(siblings)][: model.draft_tokens])
            name = f"{siblings} finished, {'linear' if paths == 1 else f'{paths} paths'}"
            rows.append(PaperRow("acceptance", "all", name, paper, (), _always(tokens), kind="given"))
    return rows


ROWS: tuple[PaperRow, ...] = tuple(
    row
    for rows in (
        _end_to_end,
        _ablation,
        _group_sizes,
        _speculation,
        _length_context,
        _partial,
        _verl,
        _acceptance,
    )
    for row in rows()
)
"""Everything that can be compared, in the order of TABLES."""
