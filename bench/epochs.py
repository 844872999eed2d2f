"""What do responses of earlier epochs draft, while the policy is trained on the same prompts?

`seer train examples/tiny_rl` with the prompts of three iterations over and over: without drafts, with drafts
from the group alone, and with drafts from the group and from the last eight responses to each prompt
(`earlier_responses`).  Weights are updated between all iterations.  Tokens and weights of each iteration are
compared between the arms by their digests.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from bench.frame import ROOT, Row, cell, markdown, spread_of, turned

ROOMS = ("seer_core", "backends/worker", "backends/vllm", "plugins/grouped_spec", "examples/tiny_rl")
ROUNDS = 3

CONFIG = ROOT / "examples" / "tiny_rl" / "train.toml"
PROMPTS = ["--set", "train.prompts=budget.py:epochs"]
EPOCH_ITERATIONS = 3
NONE, GROUP, EARLIER = "no drafts", "group", "group and earlier responses"
ARMS = {
    NONE: ["-p", "no:grouped_spec"],
    GROUP: [],
    EARLIER: ["--set", "plugin.grouped_spec.earlier_responses=8"],
}
EQUAL = ("tokens_sha256", "weights_sha256")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--epochs", type=int, default=4, help="(default 4)")
    parser.add_argument("--engine", default="vllm", help="vllm or sglang (default vllm)")


def trained(arm: str, options: argparse.Namespace) -> list[dict[str, Any]]:
    """Train in one arm; return the metrics of each iteration."""
    seer = Path(sys.executable).with_name("seer")
    with tempfile.TemporaryDirectory() as out:
        command = [seer, "train", CONFIG, "--out", out, *PROMPTS, *ARMS[arm]]
        settings = [
            f"train.iterations={EPOCH_ITERATIONS * options.epochs}",
            f"seer.engine={options.engine}",
            *options.set,
        ]
        command += [word for each in settings for word in ("--set", each)]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        lines = (Path(out) / "metrics.jsonl").read_bytes().splitlines()
    return [msgspec.json.decode(line) for line in lines]


def run(options: argparse.Namespace) -> list[Row]:
    """Train in every arm in every round; a row for each arm and epoch.

    Raises:
        RuntimeError: the arms' tokens, log-probs or weights differ.
    """
    found: dict[str, list[list[dict[str, Any]]]] = {arm: [] for arm in ARMS}
    expected: list[tuple[Any, ...]] = []
    for number, arm in turned(list(ARMS), options.rounds):
        metrics = trained(arm, options)
        found[arm].append(metrics)
        digests = [tuple(line[name] for name in EQUAL) for line in metrics]
        expected = expected or digests
        if digests != expected:
            raise RuntimeError(f"{arm}: other tokens or weights than {next(iter(ARMS))}")
        seconds = sum(line["rollout_s"] for line in metrics)
        print(f"round {number + 1}, {arm}: {seconds:.1f} s of rollouts", file=sys.stderr, flush=True)
    rows = []
    for epoch in range(options.epochs):
        part = slice(epoch * EPOCH_ITERATIONS, (epoch + 1) * EPOCH_ITERATIONS)
        seconds = {arm: [sum(each["rollout_s"] for each in one[part]) for one in found[arm]] for arm in ARMS}
        for arm in ARMS:
            rows.append(
                {
                    "epoch": epoch + 1,
                    "arm": arm,
                    "tokens": sum(line["tokens"] for line in found[arm][0][part]),
                    "acceptance_length": spread_of(_acceptance(one[part]) for one in found[arm]),
                    "rollout_s": spread_of(seconds[arm]),
                    "ratio_to_none": spread_of(
                        before / own for before, own in zip(seconds[NONE], seconds[arm], strict=True)
                    ),
                }
            )
    return rows


def _acceptance(lines: Sequence[dict[str, Any]]) -> float:
    """Return the tokens per step and request over several iterations."""
    steps = sum(line["tokens"] / line["acceptance_length"] for line in lines)
    return float(sum(line["tokens"] for line in lines) / steps)


def table(rows: Sequence[Row]) -> str:
    """Return one line for each epoch and arm."""
    columns = ["epoch", "drafts from", "tokens", "tokens per step", "rollouts, s", "speed beside no drafts"]
    lines = [
        [
            str(row["epoch"]),
            row["arm"],
            f"{row['tokens']:,}",
            cell(row["acceptance_length"], ".2f"),
            cell(row["rollout_s"], ",.1f"),
            cell(row["ratio_to_none"], ".2f", "x"),
        ]
        for row in rows
    ]
    return markdown(columns, lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return what the group and earlier responses draft in the first and the last epoch."""
    last = max(row["epoch"] for row in rows)
    parts = []
    for epoch in (1, last):
        found = {row["arm"]: row for row in rows if row["epoch"] == epoch}
        parts.append(
            f"in epoch {epoch} a step brings {found[EARLIER]['acceptance_length']['median']:.2f} tokens with"
            f" earlier responses and {found[GROUP]['acceptance_length']['median']:.2f} without"
            f" ({found[EARLIER]['ratio_to_none']['median']:.2f}x and"
            f" {found[GROUP]['ratio_to_none']['median']:.2f}x the speed of no drafts)"
        )
    words = "; ".join(parts)
    return f"{words[0].upper()}{words[1:]}. Tokens and weights were the same in all arms."
