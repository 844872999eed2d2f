"""The same training under group round-robin and under full Seer, on real engines: equal bit for bit?

Each arm trains the example anew, `seer train examples/tiny_rl/train.toml`, with the same seed.  The baseline
is what veRL does: whole groups pinned to instances, no chunks, no drafts, no KV pool.  Its weights go to the
engines by a directory, those of full Seer by shared memory.  With --kill a third arm is full Seer again, one
of whose instances gets SIGKILL after every second iteration.  KV is short on purpose, so that the baseline
preempts.  Exit status 1 if rewards, tokens, losses or weights differ anywhere.

    python benchmarks/rl_bit_equal.py --iterations 10 --out out/rl_bit_equal --json out/rl_bit_equal.json
    python benchmarks/rl_bit_equal.py --engine sglang --iterations 3 --groups 8 --kill --out out/rl_bit_equal
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
EXAMPLE = ROOT / "examples" / "tiny_rl" / "train.toml"

BASELINE = ("seer.plugins=['group_round_robin']", "seer.kv_pool=none")
SEER = ("train.weights=shared_memory",)
SAME = (
    "responses",
    "failed_rewards",
    "rewards_sha256",
    "tokens_sha256",
    "loss",
    "grad_norm",
    "weights_sha256",
)
SHOWN = ("rollout_s", "training_s", "weights_s", "preemptions", "chunks", "instances_lost")


def main(arguments: argparse.Namespace) -> int:
    """Train under each arm, compare, report; return the exit status."""
    arms = {"baseline": BASELINE, "seer": SEER}
    if arguments.kill:
        arms["seer, killed"] = SEER
    rows = {name: train(name, overrides, arguments) for name, overrides in arms.items()}
    different = differences(rows)
    if arguments.kill and not any(line["instances_lost"] for line in rows["seer, killed"]):
        different.append("no instance was lost where one should have been killed")
    print(f"{'arm':<14}" + "".join(f"{name:>16}" for name in (*SHOWN, "reward")))
    for name, lines in rows.items():
        figures = [statistics.median(line[figure] for line in lines) for figure in SHOWN[:3]]
        figures += [sum(line[figure] for line in lines) for figure in SHOWN[3:]]
        rewards = statistics.fmean(line["reward_mean"] for line in lines)
        print(f"{name:<14}" + "".join(f"{figure:>16.3f}" for figure in (*figures, rewards)))
    for line in different:
        print(line)
    if not different:
        print(f"{arguments.iterations} iterations: {', '.join(SAME)} equal bit for bit")
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        report = {
            "machine": machine,
            "engine": arguments.engine,
            "differences": different,
            "arms": rows,
        }
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 1 if different else 0


def differences(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Say where an arm learnt something else than the first one."""
    (first, expected), *others = rows.items()
    return [
        f"iteration {line['iteration']}: {figure} is {line[figure]} under {first},"
        f" {other[figure]} under {name}"
        for name, lines in others
        for line, other in zip(expected, lines, strict=True)
        for figure in SAME
        if line[figure] != other[figure]
    ]


def train(name: str, overrides: Sequence[str], arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Train under one arm; return its metrics, a mapping for each iteration."""
    out = arguments.out / name.replace(", ", "-")
    if out.exists():
        shutil.rmtree(out)
    settings = [
        f"train.iterations={arguments.iterations}",
        f"train.groups={arguments.groups}",
        f"seer.seed={arguments.seed}",
        "train.evaluation.prompts=''",
        f"seer.engine={arguments.engine}",
        f"engine.{arguments.engine}.kv_cache_bytes={arguments.kv_bytes}",
        *overrides,
        *arguments.set,
    ]
    command = [sys.executable, "-c", "from seer_main import main; main()", "train", str(EXAMPLE)]
    command += ["--out", str(out), *(part for setting in settings for part in ("--set", setting))]
    if name.endswith("killed"):
        kill_during(command, out)
    else:
        subprocess.run(command, check=True)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def kill_during(command: Sequence[str], out: Path) -> None:
    """Train, and kill an engine's worker some time after every second iteration."""
    process = subprocess.Popen(command)
    metrics, struck = out / "metrics.jsonl", 0
    while True:
        try:
            status = process.wait(0.2)
            break
        except subprocess.TimeoutExpired:
            done = metrics.read_bytes().count(b"\n") if metrics.exists() else 0
            if done >= 2 * struck + 1:
                struck += 1
                time.sleep(1.0)  # the next rollout has begun
                workers = workers_of(process.pid)
                if workers:
                    os.kill(workers[struck % len(workers)], signal.SIGKILL)
    if status:
        raise subprocess.CalledProcessError(status, command)


def workers_of(pid: int) -> list[int]:
    """Return the processes of engines that a process has started."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(stat.read_text().rsplit(") ", 1)[1].split()[1])
            command = (stat.parent / "cmdline").read_bytes()
        except OSError:
            continue
        if parent == pid and b"seer_host" in command:
            found.append(int(stat.parent.name))
    return sorted(found)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=10, help="iterations to train (default 10)")
    parser.add_argument("--groups", type=int, default=16, help="prompts an iteration, 8 responses each (16)")
    parser.add_argument("--seed", type=int, default=0, help="of prompts and responses (default 0)")
    parser.add_argument("--kv-bytes", type=int, default=4_194_304, help="KV of an instance (default 4 MiB)")
    parser.add_argument("--engine", choices=("vllm", "sglang"), default="vllm")
    parser.add_argument("--kill", action="store_true", help="train a third time, killing engines")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer train")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs; replaced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all metrics as JSON")
    sys.exit(main(parser.parse_args()))
