"""How much time does the death of a driver cost, with --resume and when it starts from nothing?

A rollout of half a minute is killed with SIGKILL after a share of its time, and the same command with
--resume ends it.  Lost is what both lives take together beyond a run that nothing disturbed; without a
journal that is all the time before the death.  The engines have no model and write a token of each response
every 50 ms, so the start of real engines comes on top.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from seer_cli.stats import Spread

from bench.harness import ROOT, Row, cell, markdown, spread_of, turned

DEPENDS_ON = ("seer_core", "plugins/journal", "cli/seer_cli", "examples/plugins/engines")
ROUNDS = 3
SHARES = (0.2, 0.5, 0.8)
ENGINES = ROOT / "examples/plugins/engines"
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "no_model"
[engine.no_model]
token_s = 0.05
[plugin.divided_rollout]
chunk_tokens = 32
[rollout]
n = 8
max_tokens = 600
"""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--picture", type=Path, metavar="FILE", help="draw the losses, as SVG or PNG")


def run(options: argparse.Namespace) -> list[Row]:
    """In each round run undisturbed, and once with a death at each share of that time."""
    lost: dict[float, list[float]] = {share: [] for share in SHARES}
    after: dict[float, list[float]] = {share: [] for share in SHARES}
    settings = [word for each in options.set for word in ("--set", each)]
    whole_s = 0.0
    with tempfile.TemporaryDirectory() as folder:
        prepare(Path(folder), CONFIG)
        for number, share in turned((0.0, *SHARES), options.rounds):
            if not whole_s or not share:
                whole_s = _live(Path(folder) / f"{number}-whole", settings)
            if share:
                out = Path(folder) / f"{number}-{share}"
                died_s = _live(out, settings, after_s=share * whole_s)
                total_s = died_s + _live(out, settings)
                after[share].append(died_s)
                lost[share].append(total_s - whole_s)
            print(f"round {number + 1}, killed after {share:.0%}", file=sys.stderr, flush=True)
    rows = [
        {"share": share, "from_nothing_s": spread_of(after[share]), "resumed_s": spread_of(lost[share])}
        for share in SHARES
    ]
    if options.picture:
        _draw(rows, options.picture)
    return rows


def prepare(folder: Path, config: str) -> None:
    """Write a config and the prompts, and install the engines for processes of ``environment_of``."""
    (folder / "seer.toml").write_text(config)
    lines = ({"prompt_token_ids": [5, number], "group_id": str(number)} for number in range(12))
    (folder / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    info = folder / "seer_no_model-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: seer-no-model\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[seer]\nno_model = seer_no_model\n")


def environment_of(folder: Path) -> dict[str, str]:
    """Return the environment in which processes find those engines."""
    paths = [str(folder), str(ENGINES), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def _live(out: Path, settings: Sequence[str], after_s: float | None = None) -> float:
    """Run the demo's command until it ends, or is killed; return the seconds that it took."""
    folder = out.parent
    command = [sys.executable, "-c", "from seer_main import main; main()", "run", str(folder / "seer.toml")]
    command += ["--prompts", str(folder / "prompts.jsonl"), "--out", str(out), "--resume", *settings]
    began = time.perf_counter()
    process = subprocess.Popen(
        command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, env=environment_of(folder)
    )
    try:
        _, errors = process.communicate(timeout=after_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
    else:
        if process.returncode:
            raise RuntimeError(f"the run ended with {process.returncode}: {errors[-2000:]}")
    return time.perf_counter() - began


def _draw(rows: Sequence[Row], path: Path) -> None:
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 3.2), layout="constrained")
    places = [row["from_nothing_s"]["median"] for row in rows]
    axes.plot(places, places, "s--", color="#d95f02", label="started from nothing")
    found = [Spread(**row["resumed_s"]) for row in rows]
    errors = [[each.median - each.least for each in found], [each.most - each.median for each in found]]
    axes.errorbar(
        places, [each.median for each in found], errors, fmt="o-", color="#1b6ca8", label="with --resume"
    )
    axes.set(xlabel="killed after, s", ylabel="lost by the death, s", ylim=(0, None))
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)


def table(rows: Sequence[Row]) -> str:
    """Return one line for each moment of the death."""
    columns = ["killed after", "lost from nothing, s", "lost with --resume, s"]
    lines = [
        [
            f"{row['share']:.0%} of the run",
            cell(row["from_nothing_s"]),
            cell(row["resumed_s"]),
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def answer(rows: Sequence[Row]) -> str:
    """Return what a death costs early and late in a run."""
    first, last = (
        f"after {row['from_nothing_s']['median']:.1f} s costs {row['resumed_s']['median']:.1f} s"
        for row in (rows[0], rows[-1])
    )
    return (
        f"With `--resume` the death of the driver {first}, and {last}."
        " Without it all the time before is lost."
    )
