"""Does a model of images learn by `seer train`, and how does its reward rise?

`examples/tiny_vision` is trained anew with several seeds: a model that overlooks squares of a picture learns
by GRPO to count them all. A reward is the mean over an iteration's responses, or over held-out pictures,
which are the same for all seeds and never trained on. With ``--out`` a training that is there already is
read, or goes on.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from bench.harness import ROOT, Row, markdown

DEPENDS_ON = ("examples/tiny_vision", "training/rl/seer_rl")
ROUNDS = 1

CONFIG = ROOT / "examples" / "tiny_vision" / "train.toml"
ENDS = 3
"""Iterations at the beginning and at the end that a mean is taken of."""
KEPT = ("reward_mean", "mean_tokens", "dlogp_mean", "dlogp_max", "grad_norm")
"""Figures of an iteration."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 2, 3], help="(default 0 2 3)")
    parser.add_argument("--out", type=Path, help="where trainings stay (default: a folder that is removed)")


def run(options: argparse.Namespace) -> list[Row]:
    """Train with each seed, one after the other."""
    with tempfile.TemporaryDirectory() as folder:
        return [trained(seed, options.out or Path(folder), options.set) for seed in options.seeds]


def trained(seed: int, folder: Path, overrides: Sequence[str]) -> Row:
    """Train with one seed, or go on; return the figures of each iteration."""
    out = folder / f"seed-{seed}"
    command = [sys.executable, "-c", "from seer_main import main; main()", "train", str(CONFIG)]
    settings = [f"seer.seed={seed}", *overrides]
    command += ["--out", str(out), "--resume", *(part for each in settings for part in ("--set", each))]
    subprocess.run(command, check=True, stdout=sys.stderr)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
    held_out = [each for line in lines for each in line["evaluations"]]
    return {
        "seed": seed,
        "responses": sum(line["responses"] for line in lines),
        "tokens": sum(line["tokens"] for line in lines),
        **{name: [line[name] for line in lines] for name in KEPT},
        "held_out": [[each["weight_version"], each["reward_mean"]] for each in held_out],
        "weights_sha256": lines[-1]["weights_sha256"],
    }


def _ends(row: Row) -> tuple[float, float]:
    rewards = row["reward_mean"]
    return statistics.fmean(rewards[:ENDS]), statistics.fmean(rewards[-ENDS:])


def answer(rows: Sequence[Row]) -> str:
    """Return how far the reward on held-out pictures rises."""
    before = [row["held_out"][0][1] for row in rows]
    after = [row["held_out"][-1][1] for row in rows]
    furthest = max(max(row["dlogp_max"]) for row in rows)
    return (
        f"Yes: with {len(rows)} seeds, the reward of a model of images on held-out pictures rises from"
        f" {min(before):.2f}-{max(before):.2f} to {min(after):.2f}-{max(after):.2f} in"
        f" {len(rows[0]['reward_mean'])} iterations. Log-probs of engines and trainer differ by"
        f" {furthest:.0e} nats at most."
    )


def table(rows: Sequence[Row]) -> str:
    """Return a line for each seed, and the reward of each iteration below."""
    lines = []
    for row in rows:
        first, last = _ends(row)
        held_out = ", ".join(f"{reward:.2f} ({version})" for version, reward in row["held_out"])
        dlogp = statistics.fmean(row["dlogp_mean"])
        lines.append(
            [
                str(row["seed"]),
                f"{row['responses']:,}",
                f"{row['tokens']:,}",
                f"{first:.2f}",
                f"{last:.2f}",
                held_out,
                f"{dlogp:.1e}",
                f"{max(row['dlogp_max']):.1e}",
            ]
        )
    columns = (
        *("seed", "responses", "tokens", f"reward, first {ENDS} iterations", f"last {ENDS}"),
        *("held out (after so many updates)", "log-probs apart, mean, nats", "most"),
    )
    curves = [
        [str(number + 1), *(f"{row['reward_mean'][number]:.3f}" for row in rows)]
        for number in range(len(rows[0]["reward_mean"]))
    ]
    below = markdown(("iteration", *(f"reward, seed {row['seed']}" for row in rows)), curves)
    return f"{markdown(columns, lines)}\n\n{below}"
