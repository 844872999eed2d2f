"""What has been found on a GPU, by scripts/gpu-check?

The reports of its parts, as they were sent to us: each check's rows, and the reason of what failed.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import msgspec

from bench.gpu.check import OTHERS, found_by
from bench.harness import Row

DEPENDS_ON = ("bench/gpu", "backends/worker/seer_worker/sampling", "backends/vllm/seer_vllm")
ROUNDS = 1


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument(
        "--reports", type=Path, nargs="+", required=True, metavar="FILE", help="gpu-check-*.json"
    )


def run(options: argparse.Namespace) -> list[Row]:
    """Read the reports."""
    return [msgspec.json.decode(path.read_bytes()) for path in options.reports]


def answer(rows: Sequence[Row]) -> str:
    """Return how many checks passed, on which GPU."""
    checks = [each for row in rows for each in row["checks"]]
    passed = [each["check"] for each in checks if each["status"] == "passed"]
    gpus = " and ".join(dict.fromkeys(row["machine"]["gpu"] for row in rows))
    return f"On {gpus}, {len(passed)} of {len(checks)} checks passed: {', '.join(passed)}."


def table(rows: Sequence[Row]) -> str:
    """Return each part's machine and checks."""
    parts = []
    for row in rows:
        shared = f" {OTHERS}" if row.get("shared") else ""
        machine = ", ".join(f"{name} {value}" for name, value in row["machine"].items())
        parts.append(f"## Part {row['part']}\n\n{machine}.{shared}")
        for check in row["checks"]:
            parts.append(f"**{check['check']}: {check['status']}**")
            parts += found_by(check)
    return "\n\n".join(parts)
