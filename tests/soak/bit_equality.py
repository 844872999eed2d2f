"""One training under group round-robin and under full Seer, on real engines.

Each arm trains the example anew with the same seed.  The baseline is what veRL does: whole groups pinned to
instances, no chunks, no drafts, no KV pool.  Its weights go to the engines by a directory, those of full Seer
by shared memory.  KV is short on purpose, so that the baseline preempts.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny_rl" / "train.toml"
TURNS = ROOT / "examples" / "tool_reasoner" / "train.toml"

ARMS = {
    "baseline": ("seer.plugins=['group_round_robin']", "seer.kv_pool=none"),
    "seer": ("train.weights=shared_memory",),
    "killed": ("train.weights=shared_memory",),
}
"""Overrides; in the last an engine gets SIGKILL after every second iteration."""

KV_BYTES = 4_194_304
SAME = (
    "responses",
    "failed_rewards",
    "rewards_sha256",
    "tokens_sha256",
    "loss",
    "grad_norm",
    "weights_sha256",
)


def differences(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """Return where the figures of an arm differ from those of the first."""
    (first, expected), *others = rows.items()
    return [
        f"iteration {line['iteration']}: {figure} is {line[figure]} under {first},"
        f" {other[figure]} under {name}"
        for name, lines in others
        for line, other in zip(expected, lines, strict=True)
        for figure in SAME
        if line[figure] != other[figure]
    ]


def train(
    arm: str,
    folder: Path,
    engine: str,
    iterations: int,
    groups: int,
    overrides: Sequence[str] = (),
    config: Path = CONFIG,
) -> list[dict[str, Any]]:
    """Train under one arm; return its metrics, a mapping for each iteration."""
    out = folder / arm
    if out.exists():
        shutil.rmtree(out)
    settings = [
        f"train.iterations={iterations}",
        f"train.groups={groups}",
        "train.evaluation.prompts=''",
        f"seer.engine={engine}",
        f"engine.{engine}.kv_cache_bytes={KV_BYTES}",
        *ARMS[arm],
        *overrides,
    ]
    command = [sys.executable, "-c", "from seer_main import main; main()", "train", str(config)]
    command += ["--out", str(out), *(part for setting in settings for part in ("--set", setting))]
    if arm == "killed":
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
        if parent == pid and b"seer_worker" in command:
            found.append(int(stat.parent.name))
    return sorted(found)
