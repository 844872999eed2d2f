"""Training on real engines while its processes are killed: does it learn the same, and lose nothing?

The example is trained in small, in peace first, and then once with each fault: a SIGKILL in the second
iteration, to a process that FAULTS names.  Training that it ended goes on with --resume.  Then rewards,
tokens, losses and weights of every iteration, and the model that comes out, must be those of peace, and no
process may be left.  Exit status 1 if not.

    python benchmarks/faults_of_training.py --out out/faults --json out/faults.json
    python benchmarks/faults_of_training.py --out out/faults --set train.trainer=megatron \\
        --set train.megatron.data_parallel=2 --only rank
"""

from __future__ import annotations

import argparse
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
from fault_kinds import children, named
from rl_bit_equal import EXAMPLE, SAME

FAULTS = {
    "reward": "a reward process, in mid-rollout",
    "engine": "an engine, in mid-rollout",
    "engine in update": "an engine that has not got the new weights yet, while another one has",
    "engine asleep": "an engine that sleeps while the trainer, on its devices, trains",
    "trainer in update": "the trainer, when one engine has got the new weights and another has not",
    "trainer": "the trainer, between an update and the checkpoint",
    "trainer in checkpoint": "the trainer, when it has written a checkpoint and not yet renamed it",
    "rank": "a rank of the trainer, in training; needs --set train.trainer=megatron",
}
ENDS_TRAINING = ("trainer", "rank")
STRUCK = "struck.json"
AT = 1
"""The iteration in which a fault happens."""
GONE_WITHIN_S = 60.0
LONGEST_S = 1200.0


def main(arguments: argparse.Namespace) -> int:
    """Train in peace and under each fault, compare, report; return the exit status."""
    peace = train("", arguments)
    report: dict[str, Any] = {"peace": peace, "faults": {}}
    wrong = bool(peace["complaints"])
    print(f"{'killed':<24}{'seconds':>9}{'with --resume':>15}  learnt")
    print(f"{'nobody':<24}{peace['seconds']:>9.0f}{'':>15}  {peace['model'][:12]}", *peace["complaints"])
    for fault in arguments.only or [each for each in FAULTS if each != "rank"]:
        found = train(fault, arguments)
        complaints = found["complaints"] + differences(peace, found)
        wrong = wrong or bool(complaints)
        print(
            f"{fault:<24}{found['seconds']:>9.0f}{'yes' if found['resumed'] else '':>15}"
            f"  {'the same' if not complaints else '; '.join(complaints)}",
            flush=True,
        )
        report["faults"][fault] = {**found, "complaints": complaints}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(report, indent=1) + "\n", "utf-8")
    return 1 if wrong else 0


def differences(peace: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Say what was learnt otherwise than in peace."""
    if len(found["lines"]) != len(peace["lines"]):
        return [f"{len(found['lines'])} iterations instead of {len(peace['lines'])}"]
    other = [
        f"iteration {one['iteration']}: {figure} is {two[figure]} and not {one[figure]}"
        for one, two in zip(peace["lines"], found["lines"], strict=True)
        for figure in SAME
        if one[figure] != two[figure]
    ]
    return other + ([] if found["model"] == peace["model"] else ["another model came out"])


def train(fault: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Train with a fault, or with none; return the metrics, a digest of the model, and what was wrong."""
    out = arguments.out / (fault or "peace").replace(" ", "-")
    shutil.rmtree(out, ignore_errors=True)
    out.mkdir(parents=True)
    settings = [
        f"train.iterations={arguments.iterations}",
        f"train.groups={arguments.groups}",
        "train.evaluation.groups=4",
        *arguments.set,
        *(["train.colocated=true"] if fault == "engine asleep" else []),
    ]
    options = ["train", str(EXAMPLE), "--out", str(out)]
    options += [part for setting in settings for part in ("--set", setting)]
    begun = time.monotonic()
    status, said = run(fault, options, out)
    complaints = []
    ends = fault.startswith(ENDS_TRAINING)
    if fault and not (out / STRUCK).exists():
        complaints.append("nobody was struck")
    elif ends:
        complaints += left_over(json.loads((out / STRUCK).read_bytes()))
    if (status != 0) != ends:
        complaints.append(f"exit status {status}: {said[-2000:]}")
    if ends:
        status, more = run("", [*options, "--resume"], out)
        said += more
        if status:
            complaints.append(f"exit status {status} of --resume: {said[-2000:]}")
    model = next(iter(sorted((out / "checkpoints").glob("[0-9]*"), reverse=True)), out)
    return {
        "seconds": time.monotonic() - begun,
        "resumed": ends,
        "said": said.splitlines(),
        "complaints": complaints,
        "lines": [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()],
        "model": digest(model),
    }


def run(fault: str, options: Sequence[str], out: Path) -> tuple[int, str]:
    """Run `seer` in a process that does the fault; return its exit status and what it said."""
    program = "import sys; from seer_main import main"
    if fault:
        program = f"from faults_of_training import prepare; prepare({fault!r}, {str(out)!r}); {program}"
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parent)}
    process = subprocess.Popen(
        [sys.executable, "-c", f"{program}; main()", *options],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    try:
        said, _ = process.communicate(timeout=LONGEST_S)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        said, _ = process.communicate()
        said += f"\nit did not end within {LONGEST_S:g} s"
    return process.returncode, said


def left_over(pids: Sequence[int]) -> list[str]:
    """Wait for processes to end, and complain of those that do not."""
    end = time.monotonic() + GONE_WITHIN_S
    while living := [pid for pid in pids if is_alive(pid)]:
        if time.monotonic() > end:
            return [f"processes are left: {living}"]
        time.sleep(0.2)
    return []


def is_alive(pid: int) -> bool:
    """Return whether there is such a process, and more of it than its exit status."""
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
    """Let a fault happen to this process, or to one that it will have started."""
    from seer_host.engine import WorkerEngine
    from seer_rl import checkpoints
    from seer_rl.display import TrainDisplay

    def strike(pid: int) -> None:
        struck = Path(out) / STRUCK
        if not struck.exists():
            struck.write_text(json.dumps([child.pid for child in children()]))
            os.kill(pid, signal.SIGKILL)

    def at_phase(wanted: str, whom: Callable[[], int]) -> None:
        phase = TrainDisplay.phase

        def watched(self: TrainDisplay, iteration: int, name: str) -> None:
            phase(self, iteration, name)
            if (iteration, name) == (AT, wanted):
                strike(whom())

        TrainDisplay.phase = watched  # type: ignore[method-assign]

    def in_mid_rollout(word: str) -> None:
        phase, responses = TrainDisplay.phase, TrainDisplay.responses
        now: list[tuple[int, str]] = []

        def watched(self: TrainDisplay, iteration: int, name: str) -> None:
            now[:] = [(iteration, name)]
            phase(self, iteration, name)

        def counted(self: TrainDisplay, finished: int, wanted: int) -> None:
            responses(self, finished, wanted)
            if now == [(AT, "rollout")] and 2 * finished >= wanted:
                strike(named(word)[0])

        TrainDisplay.phase, TrainDisplay.responses = watched, counted  # type: ignore[method-assign]

    def in_update(whom: Callable[[WorkerEngine], int]) -> None:
        update, loaded, asked = WorkerEngine.update_weights, asyncio.Event(), []

        async def struck(self: WorkerEngine, source: Any, version: int) -> str | None:
            if version != AT + 1:
                return await update(self, source, version)
            asked.append(self)
            if len(asked) == 2:
                await loaded.wait()
                loading = asyncio.ensure_future(update(self, source, version))
                await asyncio.sleep(0)
                strike(whom(self))
                return await loading
            answer = await update(self, source, version)
            loaded.set()
            return answer

        WorkerEngine.update_weights = struck  # type: ignore[method-assign]

    def in_checkpoint() -> None:
        flush = checkpoints._flush

        def struck(path: Path) -> None:
            if path.name == checkpoints.STATE and json.loads(path.read_bytes())["iterations"] == AT + 1:
                strike(os.getpid())
            flush(path)

        checkpoints._flush = struck

    def worker_of(engine: WorkerEngine) -> int:
        return int(cast("Any", engine.worker).pid)

    match fault:
        case "reward":
            in_mid_rollout("seer_rl.reward_worker")
        case "engine":
            in_mid_rollout("seer_host.child")
        case "engine in update":
            in_update(worker_of)
        case "engine asleep":
            at_phase("training", lambda: named("seer_host.child")[0])
        case "trainer in update":
            in_update(lambda engine: os.getpid())
        case "trainer":
            at_phase("checkpoint", os.getpid)
        case "trainer in checkpoint":
            in_checkpoint()
        case "rank":
            at_phase("training", lambda: named("seer_rl.megatron_rank")[-1])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--iterations", type=int, default=3, help="iterations to train (default 3)")
    parser.add_argument("--groups", type=int, default=4, help="prompts an iteration, 8 responses each (4)")
    parser.add_argument("--only", nargs="+", choices=FAULTS, metavar="FAULT", help=f"of {', '.join(FAULTS)}")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer train")
    parser.add_argument("--out", type=Path, required=True, help="directory of the runs; replaced")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all metrics as JSON")
    sys.exit(main(parser.parse_args()))
