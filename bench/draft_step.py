"""What does the host do for a step that drafts, on real engines?

Every request of the batch gets drafts that mean nothing, so that none is accepted: what is left is their
price.  The CPU time of the engine's thread outside of the model is compared with that of an engine that
cannot draft.  On a GPU this is what the device would wait for; the model's own time for the positions of
drafts is not in it.  With --against the same is measured with the packages of another checkout, in turns.
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

from bench.harness import ROOT, Row, cell, markdown, spread_of, turned

DEPENDS_ON = ("backends/worker", "backends/vllm", "backends/sglang", "backends/paced")
ROUNDS = 5

HERE, THERE = "here", "against"
SECOND = "vllm, second runner"
INTERPRETER = ROOT / "backends" / "vllm" / "tests" / "interpreter"
"""In which vLLM's second runner runs without a device."""
ANSWERED = 32
"""The batch of which the answer is."""
DRAFTS = (0, 1, 4)
PACKAGES = (
    "",
    "host",
    "backends/worker",
    "backends/vllm",
    "backends/sglang",
    "backends/paced",
    "plugins/grouped_spec",
)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    parser.add_argument("--engine", nargs="+", default=["vllm", "sglang", "paced"])
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 8, 32, 128])
    parser.add_argument("--against", type=Path, metavar="DIR", help="another checkout of the project")


def checkouts(options: argparse.Namespace) -> dict[str, Path]:
    """Return the checkouts whose packages are measured, by name."""
    return {HERE: ROOT} | ({THERE: options.against.resolve()} if options.against else {})


def printed(engine: str, arguments: Sequence[str], checkout: Path) -> list[Row]:
    """Return the JSON lines of ``host_steps`` for an engine, or the sampler, with packages of a checkout."""
    second = engine == SECOND
    packages = [*(str(checkout / each) for each in PACKAGES), *([str(INTERPRETER)] if second else [])]
    environment = {
        **vllm_environment(os.environ, 1, None, "second" if second else "first"),
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "PYTHONPATH": os.pathsep.join(packages),
    }
    python = interpreter() if engine == "sglang" else sys.executable
    command = [python, str(ROOT / "bench" / "host_steps.py"), engine.partition(",")[0], *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{engine}: {done.stderr[-2000:]}")
    return [msgspec.json.decode(line) for line in done.stdout.splitlines() if line.startswith("{")]


def steps_of(engine: str, batches: Sequence[int], drafts: Sequence[int], checkout: Path) -> list[Row]:
    """Return the times of one engine with the packages of a checkout."""
    arguments = ["--batch", *map(str, batches), "--drafts", *map(str, drafts)]
    return printed(engine, arguments, checkout)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure in every round each engine, with and without drafts, under each checkout."""
    places = checkouts(options)
    found: dict[tuple[str, str, int, int], list[float]] = {}
    arms = [(engine, name) for engine in options.engine for name in places]
    for number, (engine, name) in turned(arms, options.rounds):
        plain = {row["batch"]: row["host_s"] for row in steps_of(engine, options.batch, (), places[name])}
        for row in steps_of(engine, options.batch, DRAFTS, places[name]):
            batch, drafts = row["batch"], row["drafts"]
            found.setdefault((engine, name, batch, -1), []).append(plain[batch])
            found.setdefault((engine, name, batch, drafts), []).append(row["host_s"] - plain[batch])
        print(f"round {number + 1}: {engine}, {name}", flush=True)
    return [
        {
            "engine": engine,
            "checkout": name,
            "batch": batch,
            "drafts": None if drafts < 0 else drafts,
            "host_s": spread_of(values),
        }
        for (engine, name, batch, drafts), values in found.items()
    ]


def answer(rows: Sequence[Row]) -> str:
    """Return what one draft of each request costs, for each engine at a batch of ``ANSWERED``."""
    found: dict[str, dict[str, float]] = {}
    for row in rows:
        if (row["batch"], row["drafts"]) == (ANSWERED, 1):
            found.setdefault(row["engine"], {})[row["checkout"]] = row["host_s"]["median"] * 1e3
    costs = [f"{each[HERE]:.1f} ms more on {engine}" for engine, each in sorted(found.items())]
    return f"A step that verifies a draft of each of {ANSWERED} requests takes the host {', '.join(costs)}."


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown."""
    figures = {(row["engine"], row["checkout"], row["batch"], row["drafts"]): row["host_s"] for row in rows}
    keys = dict.fromkeys((row["engine"], row["batch"], row["checkout"]) for row in rows)

    def ms(*key: object) -> str:
        return cell({name: value * 1e3 for name, value in figures[key].items()}, ".2f")  # type: ignore[index]

    columns = (
        "engine",
        "requests",
        "packages",
        "a step, ms",
        *(f"with {drafts} drafts each, more" for drafts in DRAFTS),
    )
    return markdown(
        columns,
        (
            (engine, str(batch), name, *(ms(engine, name, batch, drafts) for drafts in (None, *DRAFTS)))
            for engine, batch, name in sorted(keys)
        ),
        left=3,
    )
