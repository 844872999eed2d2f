"""Faults in training on real engines: a SIGKILL in the second iteration, to a process that ``FAULTS`` names.

Training that it ended goes on with --resume.  Rewards, tokens, losses and weights of every iteration, and the
model that comes out, must be those of training without a fault, and no process may be left.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import psutil

from .bit_equality import CONFIG
from .bit_equality import differences as differences_of
from .fault_kinds import children, named, workers

FAULTS = {
    "reward": "a reward process, in mid-rollout",
    "engine": "an engine, in mid-rollout",
    "engine in update": "an engine without the new weights, while another one has them",
    "engine asleep": "an engine that sleeps while the trainer, on its devices, trains",
    "trainer in rollout": "the trainer, in mid-rollout, which goes on there",
    "trainer in update": "the trainer, when one engine has the new weights and another has not",
    "trainer": "the trainer, between an update and the checkpoint",
    "trainer in checkpoint": "the trainer, when it has written a checkpoint and not yet renamed it",
    "rank": "a rank of the trainer, in training; needs --set train.trainer=megatron",
}
ENDS_TRAINING = ("trainer", "rank")
INJECTED = "injected.json"
AT = 1
"""The iteration in which a fault happens."""
GONE_WITHIN_S = 60.0
LONGEST_S = 1200.0


def differences(undisturbed: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Return what differs from training without a fault."""
    if len(found["lines"]) != len(undisturbed["lines"]):
        return [f"{len(found['lines'])} iterations instead of {len(undisturbed['lines'])}"]
    other = differences_of({"no fault": undisturbed["lines"], "fault": found["lines"]})
    return other + ([] if found["model"] == undisturbed["model"] else ["another model came out"])


def train(fault: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """Train with a fault, or with none; return the metrics, a digest of the model, and complaints."""
    out = folder / (fault or "no fault").replace(" ", "-")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    settings = [
        "train.iterations=3",
        "train.groups=4",
        "train.evaluation.groups=2",
        *overrides,
        *(["train.colocated=true"] if fault == "engine asleep" else []),
    ]
    options = ["train", str(CONFIG), "--out", str(out)]
    options += [part for setting in settings for part in ("--set", setting)]
    begun = time.monotonic()
    status, output = run(fault, options, out)
    complaints = []
    ends = fault.startswith(ENDS_TRAINING)
    if fault and not (out / INJECTED).exists():
        complaints.append("no process was killed")
    elif ends:
        complaints += left_over(json.loads((out / INJECTED).read_bytes()))
    if (status != 0) != ends:
        complaints.append(f"exit status {status}: {output[-2000:]}")
    if ends:
        status, more = run("", [*options, "--resume"], out)
        output += more
        if status:
            complaints.append(f"exit status {status} of --resume: {output[-2000:]}")
    model = next(iter(sorted((out / "checkpoints").glob("[0-9]*"), reverse=True)), out)
    return {
        "seconds": time.monotonic() - begun,
        "resumed": ends,
        "output": output.splitlines(),
        "complaints": complaints,
        "lines": [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()],
        "model": digest(model),
    }


def run(fault: str, options: Sequence[str], out: Path) -> tuple[int, str]:
    """Run `seer` in a process with the fault in it; return its exit status and output."""
    program = "import sys; from seer_main import main"
    if fault:
        program = f"from soak.faults_of_training import prepare; prepare({fault!r}, {str(out)!r}); {program}"
    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; main()", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        output, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        output, _ = process.communicate()
        output += f"\nit did not end within {LONGEST_S:g} s"
    return process.returncode, output


def left_over(pids: Sequence[int]) -> list[str]:
    """Wait for processes to end, and complain of those that do not."""
    end = time.monotonic() + GONE_WITHIN_S
    while living := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > end:
            return [f"processes are left: {living}"]
        time.sleep(0.2)
    return []


def is_alive(pid: int) -> bool:
    """Return whether a process runs still."""
    try:
        return bool(psutil.Process(pid).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


def digest(checkpoint: Path) -> str:
    """Return SHA-256 of a checkpoint's weights."""
    found = hashlib.sha256()
    for path in sorted(checkpoint.glob("*.safetensors")):
        found.update(path.read_bytes())
    return found.hexdigest()


def prepare(fault: str, out: str) -> None:
    """Arrange a fault of this process, or of one that it will have started."""
    from seer_rl import checkpoints
    from seer_rl.display import TrainDisplay
    from seer_worker.client.engine import WorkerClient

    def kill(pid: int) -> None:
        injected = Path(out) / INJECTED
        if not injected.exists():
            injected.write_text(json.dumps([child.pid for child in children()]))
            os.kill(pid, signal.SIGKILL)

    def at_phase(wanted: str, victim: Callable[[], int]) -> None:
        phase = TrainDisplay.phase

        def watched(self: TrainDisplay, iteration: int, name: str) -> None:
            phase(self, iteration, name)
            if (iteration, name) == (AT, wanted):
                kill(victim())

        TrainDisplay.phase = watched  # type: ignore[method-assign]

    def in_mid_rollout(victim: Callable[[], int]) -> None:
        phase, responses = TrainDisplay.phase, TrainDisplay.responses
        now: list[tuple[int, str]] = []

        def watched(self: TrainDisplay, iteration: int, name: str) -> None:
            now[:] = [(iteration, name)]
            phase(self, iteration, name)

        def counted(self: TrainDisplay, finished: int, wanted: int) -> None:
            responses(self, finished, wanted)
            if now == [(AT, "rollout")] and 2 * finished >= wanted:
                kill(victim())

        TrainDisplay.phase, TrainDisplay.responses = watched, counted  # type: ignore[method-assign]

    def in_update(victim: Callable[[WorkerClient], int]) -> None:
        update, loaded, asked = WorkerClient.update_weights, asyncio.Event(), []

        async def interrupted(self: WorkerClient, source: Any, version: int) -> str | None:
            if version != AT + 1:
                return await update(self, source, version)
            asked.append(self)
            if len(asked) == 2:
                await loaded.wait()
                loading = asyncio.ensure_future(update(self, source, version))
                await asyncio.sleep(0)
                kill(victim(self))
                return await loading
            answer = await update(self, source, version)
            loaded.set()
            return answer

        WorkerClient.update_weights = interrupted  # type: ignore[method-assign]

    def in_checkpoint() -> None:
        flush = checkpoints._flush

        def interrupted(path: Path) -> None:
            if path.name == checkpoints.STATE and json.loads(path.read_bytes())["iterations"] == AT + 1:
                kill(os.getpid())
            flush(path)

        checkpoints._flush = interrupted

    def worker_of(engine: WorkerClient) -> int:
        return int(cast("Any", engine.worker).pid)

    match fault:
        case "reward":
            in_mid_rollout(lambda: named("seer_rl.reward_worker")[0])
        case "engine":
            in_mid_rollout(lambda: workers()[0])
        case "engine in update":
            in_update(worker_of)
        case "engine asleep":
            at_phase("training", lambda: workers()[0])
        case "trainer in rollout":
            in_mid_rollout(os.getpid)
        case "trainer in update":
            in_update(lambda engine: os.getpid())
        case "trainer":
            at_phase("checkpoint", os.getpid)
        case "trainer in checkpoint":
            in_checkpoint()
        case "rank":
            at_phase("training", lambda: named("seer_rl.megatron_rank")[-1])
