"""The same training under group round-robin and under full Seer, on real engines: equal bit for bit?

Each arm trains the example anew, `seer train examples/tiny_rl/train.toml`, with the same seed.  The baseline
is what veRL does: whole groups pinned to instances, no chunks, no drafts, no KV pool.  Its weights go to the
engines by a directory, those of full Seer by shared memory.  With --kill a third arm is full Seer again, one
of whose instances gets SIGKILL after every second iteration.  KV is short on purpose, so that the baseline
preempts.  Exit status 1 if rewards, tokens, losses or weights differ anywhere.

Seconds of a phase are the median over the iterations, with the least and the most; a ratio is between sums
over all iterations, and above 1 where the arm is faster than the baseline.

    python benchmarks/rl_bit_equal.py --iterations 10 --out out/rl_bit_equal --json out/rl_bit_equal.json
    python benchmarks/rl_bit_equal.py --engine sglang --iterations 10 --kill --out out/rl_bit_equal \\
        --beside out/rl_bit_equal.json
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
PHASES = ("rollout", "rewards", "training", "weights", "checkpoint")
COUNTS = ("preemptions", "chunks", "instances_lost")
AGREEMENT = ("dlogp_mean", "dlogp_p9999", "dlogp_max")


def main(arguments: argparse.Namespace) -> int:
    """Train under each arm, compare, report; return the exit status."""
    arms = {"baseline": BASELINE, "seer": SEER}
    if arguments.kill:
        arms["seer, killed"] = SEER
    rows = {name: train(name, overrides, arguments) for name, overrides in arms.items()}
    different = differences(rows)
    if arguments.beside:
        other = json.loads(arguments.beside.read_bytes())
        name = f"{other['engine']} in {arguments.beside}"
        different += differences({"baseline": rows["baseline"], name: other["arms"]["baseline"]})
    if arguments.kill and not any(line["instances_lost"] for line in rows["seer, killed"]):
        different.append("no instance was lost where one should have been killed")
    seconds = {name: [seconds_of(line) for line in lines] for name, lines in rows.items()}
    for line in (*phase_table(seconds), "", *iteration_table(seconds), "", *count_table(rows), ""):
        print(line)
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
            "seconds": seconds,
            "ratios": {name: ratios(seconds, name) for name in rows},
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


def seconds_of(line: Mapping[str, Any]) -> dict[str, float]:
    """Return the seconds of an iteration's phases, and of all together; no checkpoint precedes the first."""
    found = {phase: line.get(f"{phase}_s", 0.0) for phase in PHASES}
    return {**found, "iteration": sum(found.values())}


def ratios(seconds: Mapping[str, Sequence[Mapping[str, float]]], name: str) -> dict[str, float]:
    """Return how many times an arm's phases are as fast as the baseline's, where they take any time."""
    first = next(iter(seconds.values()))
    sums = {
        phase: [sum(line[phase] for line in lines) for lines in (first, seconds[name])] for phase in first[0]
    }
    return {phase: theirs / ours for phase, (theirs, ours) in sums.items() if ours}


def phase_table(seconds: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return a row for each phase: each arm's seconds, and its ratio to the baseline."""
    found = [f"{'seconds of':<14}" + "".join(f"{name:>24}{'ratio':>8}" for name in seconds)]
    for phase in (*PHASES, "iteration"):
        row = f"{phase:<14}"
        for name, lines in seconds.items():
            values = [line[phase] for line in lines]
            spread = f"{statistics.median(values):.3f} ({min(values):.3f}-{max(values):.3f})"
            ratio = ratios(seconds, name).get(phase)
            row += f"{spread:>24}" + (f"{ratio:>8.2f}" if ratio else f"{'':>8}")
        found.append(row)
    return found


def iteration_table(seconds: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return a row for each iteration: each arm's seconds of rollout, and its ratio to the baseline."""
    found = [f"{'rollout of':<14}" + "".join(f"{name:>24}{'ratio':>8}" for name in seconds)]
    for number, lines in enumerate(zip(*seconds.values(), strict=True)):
        values = [line["rollout"] for line in lines]
        found.append(
            f"{number:<14}" + "".join(f"{value:>24.3f}{values[0] / value:>8.2f}" for value in values)
        )
    return found


def count_table(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return a row for each arm: what happened in all iterations, mean reward, worst log-prob agreement."""
    found = [f"{'arm':<14}" + "".join(f"{name:>16}" for name in (*COUNTS, "reward", *AGREEMENT))]
    for name, lines in rows.items():
        counts = [sum(line[count] for line in lines) for count in COUNTS]
        reward = statistics.fmean(line["reward_mean"] for line in lines)
        worst = [max(line[figure] for line in lines) for figure in AGREEMENT]
        found.append(
            f"{name:<14}"
            + "".join(f"{count:>16}" for count in counts)
            + f"{reward:>16.3f}"
            + "".join(f"{figure:>16.1e}" for figure in worst)
        )
    return found


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
    parser.add_argument(
        "--beside", type=Path, metavar="FILE", help="--json of a run on another engine, to compare with too"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all metrics as JSON")
    sys.exit(main(parser.parse_args()))
