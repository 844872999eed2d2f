"""How long does an engine take to start: forked from a process that has imported it, and by itself?

In each round an engine of the demo starts in both ways, in turn: a first session of two instances, a second
one in the same process, and an instance whose worker is killed.  Times run from the start to the readiness of
all instances, and from the kill to the readiness of the new worker; all are seconds of the clock on the wall.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
from collections import defaultdict
from collections.abc import Sequence
from itertools import product
from time import perf_counter
from typing import Any

from seer_cli.stats import ratios
from seer_worker.client.fork_server import end_all

from bench.frame import EXAMPLE, Row, cell, markdown, spread_of, turned
from seer_core.model.events import Command, Event, InstanceStarted
from seer_core.plugins.config import load_config
from seer_core.runtime.runtime import Runtime

ROOMS = ("backends/worker", "backends/vllm", "backends/sglang")
ROUNDS = 5

STEPS = {
    "first": "first session",
    "one": "a further instance",
    "next": "a further session",
    "killed": "after a kill",
}
"""What is timed, by its name in rows."""


class Starts:
    """An observer that resolves ``ready`` with the next instance that has started."""

    def __init__(self) -> None:
        self.ready: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Notice a start."""
        if isinstance(event, InstanceStarted) and not self.ready.done():
            self.ready.set_result(event.info.id)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--engine", nargs="+", default=["vllm", "sglang"], help="engines (default both)")


async def run(options: argparse.Namespace) -> list[Row]:
    """Measure every engine in both ways in every round."""
    arms = list(product(options.engine, (False, True)))
    times: dict[tuple[str, bool, str], list[float]] = defaultdict(list)
    for number, (engine, forked) in turned(arms, options.rounds):
        found = await _one_round(engine, forked, options.set)
        for step, seconds in found.items():
            times[engine, forked, step].append(seconds)
        shown = ", ".join(f"{STEPS[step]} {seconds:.1f} s" for step, seconds in found.items())
        how = "forked" if forked else "by itself"
        print(f"round {number + 1}, {engine} {how}: {shown}", file=sys.stderr, flush=True)
    return [
        {
            "engine": engine,
            "forked": forked,
            "step": step,
            "start_s": spread_of(taken),
            "time_to_old": spread_of(ratios(taken, times[engine, False, step])),
        }
        for (engine, forked, step), taken in times.items()
    ]


async def _one_round(engine: str, forked: bool, overrides: Sequence[str]) -> dict[str, float]:
    """Return the seconds of each start, in a process that has no fork server yet."""
    end_all()
    both, one = (
        load_config(
            EXAMPLE / "demo.toml",
            [
                f"seer.engine={engine}",
                f"engine.{engine}.instances={instances}",
                f"engine.{engine}.fork_server={str(forked).lower()}",
                *overrides,
            ],
        )
        for instances in (2, 1)
    )
    found = {}
    for step, config in (("first", both), ("one", one), ("next", both)):
        starts = Starts()
        begun_s = perf_counter()
        async with Runtime.from_config(config, [starts]) as runtime:
            found[step] = perf_counter() - begun_s
            if step != "next":
                continue
            instance, client = next(iter(runtime.engines.items()))
            worker: Any = client
            starts.ready = asyncio.get_running_loop().create_future()
            begun_s = perf_counter()
            os.kill(worker.worker.pid, signal.SIGKILL)
            if await starts.ready != instance:
                raise RuntimeError("another instance than the killed one has started")
            found["killed"] = perf_counter() - begun_s
    return found


def table(rows: Sequence[Row]) -> str:
    """Return one line for each engine and start."""
    found = {(row["engine"], row["step"], row["forked"]): row for row in rows}
    lines = [
        [
            engine,
            STEPS[step],
            cell(found[engine, step, False]["start_s"], ".1f", " s"),
            cell(row["start_s"], ".1f", " s"),
            cell(row["time_to_old"], ".2f"),
        ]
        for (engine, step, forked), row in found.items()
        if forked
    ]
    return markdown(["engine", "start", "by itself", "forked", "time, ratio"], lines, left=2)


def answer(rows: Sequence[Row]) -> str:
    """Return the time of a further start in both ways, for each engine."""
    found = {(row["engine"], row["step"], row["forked"]): row["start_s"]["median"] for row in rows}
    sentences = []
    for engine in dict.fromkeys(row["engine"] for row in rows):
        one, killed = (
            f"{found[engine, step, True]:.1f} s in place of {found[engine, step, False]:.1f} s"
            for step in ("one", "killed")
        )
        sentences.append(
            f"On {engine} a further instance is ready after {one}, and a killed one after {killed}."
        )
    return " ".join(sentences)
