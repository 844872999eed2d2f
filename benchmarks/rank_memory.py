"""What the ranks of the trainer `megatron` keep while the engines of a colocated run work.

Two ranks train the example's model on made-up samples, once beside engines of their own place, and once
colocated, where a rank gives back to the system what a training step has freed.  Shown is a rank's PSS, its
memory with its part of what it shares: the median of all ranks after each call, with the least and the most.

    python benchmarks/rank_memory.py --json out/rank_memory.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
from pathlib import Path
from typing import Any

import psutil
from megatron_layouts import MODEL, make_samples
from seer_rl.config import MegatronTable, TrainTable
from seer_rl.megatron import MegatronTrainer

MIB = 1 << 20


def main(arguments: argparse.Namespace) -> None:
    """Train either way, report."""
    print(f"{'MiB of a rank':<18}{'before a step':>16}{'after a step':>26}")
    rows = []
    for colocated in (False, True):
        row = measure(colocated, arguments)
        after = statistics.median(row["after"])
        spread = f"{after:.0f} ({min(row['after']):.0f}-{max(row['after']):.0f})"
        name = "colocated" if colocated else "separate"
        print(f"{name:<18}{statistics.median(row['before']):>16.0f}{spread:>26}", flush=True)
        rows.append(row)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", "utf-8")


def measure(colocated: bool, arguments: argparse.Namespace) -> dict[str, Any]:
    """Return MiB of each rank before the first call and after each."""
    table = TrainTable(
        "", "", colocated=colocated, megatron=MegatronTable(tensor_parallel=arguments.tensor_parallel)
    )
    samples = make_samples(arguments.samples, arguments.tokens)
    with MegatronTrainer(table, MODEL, 0) as trainer:
        pids = trainer._ranks.pids  # type: ignore[union-attr]
        before, after = held(pids), []
        for _ in range(arguments.repeat):
            trainer.train(samples)
            after += held(pids)
    return {"colocated": colocated, "before": before, "after": after}


def held(pids: list[int]) -> list[float]:
    """Return MiB of processes."""
    return [psutil.Process(pid).memory_full_info().pss / MIB for pid in pids]


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tensor-parallel", type=int, default=2, help="ranks (default 2)")
    parser.add_argument("--samples", type=int, default=256, help="of a call (default 256, the example's)")
    parser.add_argument("--tokens", type=int, default=150, help="of a response, on average (default 150)")
    parser.add_argument("--repeat", type=int, default=3, help="calls (default 3)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures as JSON")
    main(parser.parse_args())
