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
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .fault_kinds import workers

ROOT = Path(__file__).parents[2]
CONFIG = ROOT / "examples" / "tiny_rl" / "train.toml"
PICTURES = ROOT / "examples" / "tiny_vision" / "train.toml"
TURNS = ROOT / "examples" / "tool_reasoner" / "train.toml"

ARMS = {
    "baseline": ("seer.plugins=['group_round_robin']", "seer.kv_pool=none"),
    "seer": ("train.weights=shared_memory",),
    "killed": ("train.weights=shared_memory",),
}
"""Overrides; in the last an engine gets SIGKILL in the rollout of every second iteration."""

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
    program = "from seer_main import main; main()"
    if arm == "killed":
        program = f"from soak.bit_equality import kill_in_rollouts; kill_in_rollouts(); {program}"
    command = [sys.executable, "-c", program, "train", str(config), "--out", str(out)]
    command += [part for setting in settings for part in ("--set", setting)]
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    subprocess.run(command, check=True, env=environment)
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def kill_in_rollouts() -> None:
    """Have this process, which trains, kill an engine when a response of every second rollout is over.

    Most of that rollout is then still to come, so that the loss is noticed in it.
    """
    from seer_rl.display import TrainDisplay

    phase, responses = TrainDisplay.phase, TrainDisplay.responses
    now: list[tuple[int, str]] = []
    struck: list[int] = []

    def watched(self: TrainDisplay, iteration: int, name: str) -> None:
        now[:] = [(iteration, name)]
        phase(self, iteration, name)

    def counted(self: TrainDisplay, finished: int, wanted: int) -> None:
        responses(self, finished, wanted)
        [(iteration, name)] = now
        if name == "rollout" and iteration % 2 and iteration not in struck:
            struck.append(iteration)
            pids = workers()
            os.kill(pids[len(struck) % len(pids)], signal.SIGKILL)

    TrainDisplay.phase, TrainDisplay.responses = watched, counted  # type: ignore[method-assign]
