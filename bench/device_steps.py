"""What does Seer add to a step on a GPU, as far as it can be counted without one?

Waits: real engines step on a CPU, and what stands in for their samplers works on a device that is not there,
where each wait of the host is counted (``device_waits``): a tensor that is read, a copy from memory that is
not pinned, a shape that depends on numbers.  The engine's own waits are not in it.  Sampler: its CPU time for
rows of 151,936 logits, one thread, and the instructions of its kernels for each logit, compiled for an H100.
With --against the same is done with the packages of another checkout, in turns.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from seer_sglang.doctor import interpreter
from seer_vllm.plugin import vllm_environment

from bench.draft_step import HERE, PACKAGES, THERE
from bench.harness import ROOT, Row, cell, markdown, spread_of, turned

DEPENDS_ON = ("backends/worker/seer_worker/sampling", "backends/vllm", "backends/sglang")
ROUNDS = 1
TARGET = "sm_90"
BATCH, DRAFTS, STEPS = 8, 4, 10
SECOND = "vllm, second runner"
INTERPRETER = ROOT / "backends" / "vllm" / "tests" / "interpreter"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", nargs="*", default=["vllm", SECOND, "sglang"])
    parser.add_argument("--rows", type=int, default=256, help="of logits, whose choice is timed")
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of the project")


def printed(
    python: str, script: str, arguments: Sequence[str], checkout: Path, engine: str = ""
) -> list[Row]:
    """Return the JSON lines of a script that runs with the packages of a checkout."""
    second = engine == SECOND
    packages = [*(str(checkout / each) for each in PACKAGES), *([str(INTERPRETER)] if second else [])]
    environment = {
        **vllm_environment(os.environ, 1, None, "second" if second else "first"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join(packages),
    }
    command = [python, str(ROOT / "bench" / script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine or script}: {done.stderr[-2000:]}")
    return [msgspec.json.decode(line) for line in done.stdout.splitlines() if line.startswith("{")]


def waits_of(engine: str, checkout: Path) -> list[Row]:
    """Return the waits of a step of an engine that can draft, with and without drafts."""
    python = interpreter() if engine == "sglang" else sys.executable
    sizes = ["--batch", str(BATCH), "--steps", str(STEPS), "--drafts", "0", str(DRAFTS)]
    return printed(python, "host_steps.py", [engine.partition(",")[0], "--waits", *sizes], checkout, engine)


def run(options: argparse.Namespace) -> list[Row]:
    """Count the waits, compile the kernels, and time the choices, under each checkout in turns."""
    checkouts = {HERE: ROOT} | ({THERE: options.against.resolve()} if options.against else {})
    rows: list[Row] = []
    for name, checkout in checkouts.items():
        for engine in options.engine:
            rows += (
                {"of": "waits", "engine": engine, "checkout": name, **row}
                for row in waits_of(engine, checkout)
            )
        kernels = printed(sys.executable, "sampler_steps.py", ["--kernels", TARGET], checkout)
        rows += ({"of": "kernels", "checkout": name, **row} for row in kernels)
    times: dict[tuple[str, str], list[float]] = {}
    tokens: dict[str, set[int]] = {}
    for _, name in turned([*checkouts], options.rounds):
        for row in printed(
            sys.executable, "sampler_steps.py", ["--rows", str(options.rows)], checkouts[name]
        ):
            times.setdefault((row["cuts"], name), []).append(row["cpu_s"])
            tokens.setdefault(row["cuts"], set()).add(row["tokens"])
    for cuts, found in tokens.items():
        if len(found) > 1:
            raise SystemExit(f"the checkouts choose other tokens: {cuts}")
    rows += (
        {"of": "choice", "cuts": cuts, "checkout": name, "rows": options.rows, "cpu_s": spread_of(found)}
        for (cuts, name), found in times.items()
    )
    return rows


def answer(rows: Sequence[Row]) -> str:
    """Return the waits of each engine with and without drafts, and what top-p adds to the sampler."""
    waits: dict[str, list[int]] = {}
    for row in rows:
        if row["of"] == "waits" and row["checkout"] == HERE:
            waits.setdefault(row["engine"], []).append(row["waits"])
    each = "; ".join(
        f"{engine} {plain} without drafts and {drafted} with" for engine, (plain, drafted) in waits.items()
    )
    times = {
        row["cuts"]: row["cpu_s"]["median"]
        for row in rows
        if row["of"] == "choice" and row["checkout"] == HERE
    }
    counted = f"With a drafter the host waits for the device in a step this often: {each}. " if each else ""
    more = 100 * (times["top-p"] / times["none"] - 1)
    return f"{counted}On a CPU a choice of tokens with top-p takes {more:.0f} % longer than without."


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    waits = [row for row in rows if row["of"] == "waits"]
    found = [
        markdown(
            ("engine", "packages", "drafts of each request", "for what", "waits of a step"),
            (
                (
                    row["engine"],
                    row["checkout"],
                    str(row["drafts"]),
                    ", ".join(f"{name}: {count}" for name, count in row["for"].items()),
                    str(row["waits"]),
                )
                for row in sorted(waits, key=lambda row: row["engine"])
            ),
            left=4,
        )
    ]
    kernels = [row for row in rows if row["of"] == "kernels"]
    found.append(
        markdown(
            ("kernel", "packages", "instructions", "by the logits of a thread", "registers"),
            (
                (
                    row["kernel"],
                    row["checkout"],
                    str(row["instructions"]),
                    "" if row["per_logit"] is None else f"{row['per_logit']:.0f}",
                    str(row["registers"]),
                )
                for row in kernels
            ),
            left=2,
        )
    )
    choices = [row for row in rows if row["of"] == "choice"]
    found.append(
        markdown(
            ("cuts", "rows", "packages", "a choice on a CPU, ms"),
            (
                (
                    row["cuts"],
                    str(row["rows"]),
                    row["checkout"],
                    cell({name: value * 1e3 for name, value in row["cpu_s"].items()}, ",.0f"),
                )
                for row in sorted(choices, key=lambda row: row["cuts"])
            ),
            left=3,
        )
    )
    return "\n\n".join(found if waits else found[1:])
