"""How soon are faults of a cluster noticed and made good, and what do they cost a rollout's responses?

`seer run` rolls out on three instances without a model, which Ray places on four machines made of Linux
namespaces, each with a network, processes and files of its own.  Faults come at random times, one after the
other or several at once.  A machine that breaks is replaced by a new one; a command that has died goes on
with --resume, after the loss of the head on a new cluster.  Every finished rollout has each response once,
and its tokens are compared with those of child processes on one machine.  Noticed is the time from the fault
to the loss of the instance; for a driver it is the time until no machine has a process of its own any more.
Recovered is the time from then until the instance is ready again, on the spare machine or the same one; a
model's loading would come on top.  Ray's health checks are set to 8 seconds; a connection is given up after
15 seconds of silence.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.frame import Row, markdown

ROOMS = ("seer_core", "backends/ray/seer_ray", "backends/worker/seer_worker", "plugins/journal")
ROUNDS = 1
TOTAL = "total"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--faults", type=int, default=240, help="(default 240)")
    parser.add_argument("--minutes", type=float, default=60.0, help="no fault comes later (default 60)")
    parser.add_argument("--seed", type=int, default=11, help="(default 11)")


def run(options: argparse.Namespace) -> list[Row]:
    """Carry a campaign out; the last row has what was found in all its rollouts."""
    from tests.soak.cluster_campaign import ClusterCampaign, ClusterPlan

    plan = ClusterPlan(options.seed, options.faults, minutes=options.minutes)
    with tempfile.TemporaryDirectory() as folder:
        campaign = ClusterCampaign(plan, Path(folder))
        campaign.run()
    if campaign.complaints:
        raise RuntimeError("; ".join(campaign.complaints))
    return [*campaign.rows(), {"kind": TOTAL, **campaign.totals()}]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each kind of fault, and what came of all rollouts."""
    columns = ["fault", "faults", "instances lost", "noticed after, s", "recovered after, s"]
    lines = [
        [
            row["kind"],
            f"{row['faults']}",
            f"{row['losses']}",
            _cell(row["noticed_s"]),
            _cell(row["recovered_s"]),
        ]
        for row in rows
        if row["kind"] != TOTAL
    ]
    found = rows[-1]
    words = (
        f"{found['runs']} rollouts in {found['lives']} lives of the command, {found['joined']} machines that"
        f" joined, {found['responses']:,} responses: {found['lost']} lost, {found['doubled']} twice,"
        f" {found['wrong']} with a wrong token. Figures are the median, followed by [the most]."
    )
    return f"{markdown(columns, lines)}\n\n{words}"


def _cell(figure: Mapping[str, Any] | None) -> str:
    return "" if figure is None else f"{figure['median']:.1f} [{figure['most']:.1f}]"


def answer(rows: Sequence[Row]) -> str:
    """Return the number of faults, what they cost, and the slowest notice."""
    found = rows[-1]
    faults = sum(row["faults"] for row in rows[:-1])
    noticed = [row["noticed_s"]["most"] for row in rows[:-1] if row["noticed_s"]]
    return (
        f"{faults} faults, {found['responses']:,} responses: {found['lost']} lost, {found['doubled']} twice,"
        f" {found['wrong']} wrong; every loss was noticed within {max(noticed):.0f} s."
    )
