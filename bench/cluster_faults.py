"""How soon are faults of a cluster noticed and made good, and what do they cost a rollout's responses?

`seer run` rolls out on three instances, which Ray places on four machines made of Linux namespaces, each with
a network, processes and files of its own.  The instances are scripted ones without a model (``scripted``),
vLLM's scheduler on an emulated accelerator (``paced``), and vLLM with the bundled model and Mooncake's pool
(``vllm``).  Faults come at random times, one after the other or several at once.  A machine that breaks is
replaced by a new one; a command that has died goes on with --resume, after the loss of the head on a new
cluster.  Every finished rollout has each response once, and its tokens are compared with those of child
processes on one machine.  Noticed is the time from the fault to the loss of the instance; for a driver it is
the time until no machine has a process of its own any more.  Recovered is the time from then until the
instance is ready again, on the spare machine or the same one.  Ray's health checks are set to 8 seconds; a
connection is given up after 15 seconds of silence.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.harness import Row, markdown
from seer_core.error_origin import one_line

DEPENDS_ON = ("seer_core", "backends/ray/seer_ray", "backends/worker/seer_worker", "plugins/journal")
ROUNDS = 1
TOTAL = "total"
FAULTS = {"scripted": 200, "paced": 6, "vllm": 12}
GROUPS = {"scripted": 40, "paced": 16, "vllm": 12}


def add_options(
    parser: argparse.ArgumentParser, faults: Mapping[str, int], minutes: float, seed: int
) -> None:
    """Add the options of a campaign on several engines."""
    usual = ", ".join(f"{name}={count}" for name, count in faults.items())
    parser.add_argument(
        "--faults",
        action="append",
        default=[],
        metavar="ENGINE=N",
        help=f"as often as there are engines (default {usual})",
    )
    parser.add_argument(
        "--minutes", type=float, default=minutes, help=f"of each engine at most (default {minutes:.0f})"
    )
    parser.add_argument("--seed", type=int, default=seed, help=f"(default {seed})")


def wanted(options: argparse.Namespace, faults: Mapping[str, int]) -> Mapping[str, int]:
    """Return the number of faults of each engine."""
    return {name: int(count) for name, _, count in (each.partition("=") for each in options.faults)} or faults


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    add_options(parser, FAULTS, minutes=60.0, seed=11)


def run(options: argparse.Namespace) -> list[Row]:
    """Carry a campaign out on each engine; its last row has what was found in all its rollouts."""
    from tests.soak.cluster_campaign import ClusterCampaign, ClusterPlan

    rows: list[Row] = []
    for engine, faults in wanted(options, FAULTS).items():
        plan = ClusterPlan(options.seed, faults, GROUPS[engine], minutes=options.minutes, engine=engine)
        with tempfile.TemporaryDirectory() as folder:
            campaign = ClusterCampaign(plan, Path(folder))
            campaign.run()
        found = [*campaign.rows(), {"kind": TOTAL, **campaign.totals()}]
        rows += [{"engine": engine, **row} for row in found]
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return for each engine one line for each kind of fault, and what came of all rollouts."""
    columns = ["fault", "faults", "instances lost", "noticed after, s", "recovered after, s"]
    parts = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        *kinds, found = (row for row in rows if row["engine"] == engine)
        lines = [
            [
                row["kind"],
                f"{row['faults']}",
                f"{row['losses']}",
                _cell(row["noticed_s"]),
                _cell(row["recovered_s"]),
            ]
            for row in kinds
        ]
        faults = sum(row["faults"] for row in kinds)
        words = (
            f"`{engine}`: {faults} faults, {found['runs']} rollouts in {found['lives']} lives of the command,"
            f" {found['joined']} machines that joined, {found['responses']:,} responses:"
            f" {found['lost']} lost, {found['doubled']} twice, {found['wrong']} with a wrong token."
        )
        parts += [words, *(f"Not as it must be: {one_line(each)}" for each in found["complaints"])]
        parts.append(markdown(columns, lines))
    return "\n\n".join([*parts, "Figures are the median, followed by [the most]."])


def _cell(figure: Mapping[str, Any] | None) -> str:
    return "" if figure is None else f"{figure['median']:.1f} [{figure['most']:.1f}]"


def answer(rows: Sequence[Row]) -> str:
    """Return the number of faults, what they cost, and the slowest notice."""
    found = [row for row in rows if row["kind"] == TOTAL]
    kinds = [row for row in rows if row["kind"] != TOTAL]
    noticed = [row["noticed_s"]["most"] for row in kinds if row["noticed_s"]]
    lost, doubled, wrong, responses = (
        sum(row[name] for row in found) for name in ("lost", "doubled", "wrong", "responses")
    )
    complaints = sum(len(row["complaints"]) for row in found)
    cost = "none lost or changed"
    if lost or doubled or wrong:
        cost = f"{lost} lost, {doubled} twice, {wrong} wrong"
    return (
        f"{sum(row['faults'] for row in kinds)} faults of a cluster, {responses:,} responses: {cost}; every"
        f" loss was noticed within {max(noticed):.0f} s."
        + (f" {complaints} of its checks failed." if complaints else "")
    )
