"""How well does the simulator predict a rollout with drafts, without the outcome of any?

Groups of recorded responses are split into two halves at random, five times.  One half is rolled out on an
emulated accelerator, under vLLM's own scheduler and with drafts of the real index (``paced``), and in the
simulator.  The simulator gets no figure of that rollout.  ``own text``: responses that were recorded without
drafts are replayed through the draft index, as `seer twin --drafts` does.  ``other half``: the text is not
known either, and a response is drafted like one of the other half that is about as long; the median of five
draws.  Policies without drafts need neither, and have one row.

``recorded-text`` is the first fifth of 250 responses of a reasoning model (not published, `--data` names its
folder), on two instances of Qwen2-VL-72B whose tokens of context are five times as dear.  ``tiny-reasoner``
is the bundled model's text, on one instance.  A round is a split.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from random import Random
from statistics import median
from typing import Any

import numpy as np
from msgspec.structs import replace
from seer_grouped_spec.replay import Recording
from seer_lab.policies import POLICIES
from seer_lab.replayed import replayed_drafts, with_replayed
from seer_lab.simulate import simulate
from seer_lab.texts import RecordedText
from seer_lab.workloads import Workload, crowded

from bench.frame import DATA, Row, markdown
from bench.paced import CLUSTERS, LOADS, PRESSURE, TINY_FACTOR, dearer, figures

ROOMS = (
    "seer_core",
    "plugins",
    "backends/sim",
    "backends/vllm",
    "backends/worker",
    "backends/paced",
    "lab",
    "bench/data",
)
ROUNDS = 5

TEXTS: Mapping[str, tuple[int, int]] = {"tiny-reasoner": (1, TINY_FACTOR), "recorded-text": (2, 5)}
"""Instances of a half, and how many times as dear its tokens of context are."""

BASELINE, DRAFTING = "verl", "seer"
POLICY_NAMES = (BASELINE, DRAFTING, "oracle")
OWN, OTHER, NONE = "own text", "other half", "no drafts"
DRAWS = 5


def half_of(load: Workload, ids: Iterable[str], instances: int, by: int) -> Workload:
    """Return the workload with these groups alone, on so many instances."""
    wanted = set(ids)
    assert load.text is not None
    text = RecordedText(
        {group: tokens for group, tokens in load.text.prompts.items() if group in wanted},
        {name: tokens for name, tokens in load.text.responses.items() if name.rpartition("/")[0] in wanted},
    )
    groups = [group for group in load.groups(0) if group.id in wanted]
    half = crowded(load.name, [groups], CLUSTERS["qwen2-vl-72b"], instances, PRESSURE)
    return replace(half, tables=dearer(half.tables, by), text=text)


def recordings_of(load: Workload) -> list[Recording]:
    """Return the text of a workload's groups."""
    text = load.text
    assert text is not None
    return [
        Recording(
            group.id,
            np.array(text.prompts[group.id], np.int32),
            tuple(
                np.array(text.responses[f"{group.id}/{number}"], np.int32)
                for number in range(len(group.output_tokens))
            ),
        )
        for group in load.groups(0)
    ]


def split_of(load: Workload, number: int) -> tuple[list[str], list[str]]:
    """Return the ids of two halves of the groups."""
    names = sorted(group.id for group in load.groups(0))
    Random(number).shuffle(names)
    return names[: len(names) // 2], names[len(names) // 2 :]


def predicted(half: Workload, other: Workload, policy: str) -> dict[str, list[dict[str, Any]]]:
    """Return the simulator's figures by what it had of the drafts, draw by draw."""
    if policy != DRAFTING:
        return {NONE: [figures(simulate(half, POLICIES[policy]))]}
    found = {}
    for name, source, draws in ((OWN, half, 1), (OTHER, other, DRAWS)):
        drafts = replayed_drafts(recordings_of(source))
        found[name] = [
            figures(simulate(with_replayed(half, replace(drafts, draw=draw)), POLICIES[policy]))
            for draw in range(draws)
        ]
    return found


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--only", nargs="+", choices=list(TEXTS), default=["tiny-reasoner"], help="texts")
    parser.add_argument("--data", type=Path, default=DATA.parent, help="folder of data that is not published")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out one half of each split under each policy, on both engines."""
    rows: list[Row] = []
    for name in options.only:
        load = LOADS[name](options.data)
        for split in range(options.rounds):
            one, two = (half_of(load, ids, *TEXTS[name]) for ids in split_of(load, split))
            for policy in POLICY_NAMES:
                row: Row = {"case": load.name, "policy": policy, "split": split}
                row["sim"] = predicted(two, one, policy)
                row["paced"] = figures(simulate(two, POLICIES[policy], engine="paced"))
                rows.append(row)
                total_s, wall_s = row["paced"]["total_time_s"], row["paced"]["wall_s"]
                print(
                    f"{name}, split {split}, {policy}: {total_s:.1f} s in {wall_s:.0f} s",
                    file=sys.stderr,
                    flush=True,
                )
    return rows


def errors(rows: Sequence[Row]) -> dict[tuple[str, str, str], dict[str, list[float]]]:
    """Return by text, policy and what the simulator had: errors of each split's total, tail and speed-up."""
    first = {(row["case"], row["split"]): row for row in rows if row["policy"] == BASELINE}
    found: dict[tuple[str, str, str], dict[str, list[float]]] = {}
    for row in rows:
        base = first[row["case"], row["split"]]
        for had, draws in row["sim"].items():
            mine = {name: median(draw[name] for draw in draws) for name in ("total_time_s", "tail_time_s")}
            off = {name: mine[name] / row["paced"][name] - 1 for name in mine}
            speed = base["sim"][NONE][0]["total_time_s"] / mine["total_time_s"]
            off["speed_up"] = speed / (base["paced"]["total_time_s"] / row["paced"]["total_time_s"]) - 1
            for name, error in off.items():
                found.setdefault((row["case"], row["policy"], had), {}).setdefault(name, []).append(error)
    return found


def table(rows: Sequence[Row]) -> str:
    """Return errors by text, policy and what the simulator had: their size, the median and the worst."""
    columns = ["text", "policy", "simulator has", "total off: median", "worst", "tail off: median", "worst"]
    columns += ["speed-up off: median", "worst"]
    lines = []
    for (case, policy, had), found in errors(rows).items():
        line = [case, policy, had]
        for off in found.values():
            sizes = [abs(error) for error in off]
            line += [f"{median(sizes):.1%}", f"{max(sizes):.1%}"]
        lines.append(line)
    return markdown(columns, lines, left=3)


def answer(rows: Sequence[Row]) -> str:
    """Return how far predictions with drafts are off in the worst split."""
    found = errors(rows)
    parts = []
    for had, words in ((OWN, "From a replay of its own text"), (OTHER, "from the other half's text")):
        worst = [
            max(abs(error) for key, off in found.items() if key[2] == had for error in off[name])
            for name in ("total_time_s", "tail_time_s")
        ]
        parts.append(f"{words}, total time is at most {worst[0]:.1%} off and tail time {worst[1]:.1%}")
    return f"{'; '.join(parts)}."
