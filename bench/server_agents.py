"""How soon does `seer serve` answer a turn while a thousand trajectories wait in tools, and at what CPU?

Each trajectory begins at a time of its own, streams a turn, waits for its tool, and streams the next turn,
with its context so far as the prompt.  Its tools take from half to one and a half of --tool-s.  Engines are
simulated and send pieces at the ends of chunks, but their time is virtual.  So the time to the first token,
which the client measures, and the server's CPU are Seer's own and HTTP's:

  without ids   each turn is a request of its own
  with ids      it has the id of its trajectory, and those of eight trajectories are a group
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import attrs
import httpx
import msgspec
import numpy as np
from seer_host.viewer_port import allow_files

from bench.harness import Row, cell, markdown, spread_of, turned

DEPENDS_ON = ("seer_core", "serving/server", "backends/sim")
ROUNDS = 3
ARMS = ("without ids", "with ids")
SIBLINGS = 8
PATIENCE_S = 600.0
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "sim"
[rollout]
max_tokens = 256
[plugin.divided_rollout]
chunk_tokens = 16
[engine.sim]
instances = 2
kv_capacity_tokens = 65536
[engine.sim.lengths]
mean_tokens = 64.0
"""
PROMPT_TOKENS, ANSWER_TOKENS = 500, 100


@attrs.frozen
class Load:
    """So many trajectories of so many turns, whose tools take about ``tool_s`` seconds."""

    trajectories: int
    turns: int
    tool_s: float


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--trajectories", type=int, default=1000, help="at a time (default 1000)")
    parser.add_argument("--turns", type=int, default=5, help="of each trajectory (default 5)")
    parser.add_argument("--tool-s", type=float, default=10.0, help="seconds of a tool (default 10)")


def serve(config: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the server; return it and its address."""
    command = [sys.executable, "-c", "from seer_main import main; main()", "serve", str(config)]
    options = ["--port", "0", "--log-level", "warning", "--most-requests", "100000", "--open-completions"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"running on (http://\S+)", line):
            return process, found[1]
    raise SystemExit("the server did not start")


def cpu_s(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def trajectory(http: httpx.AsyncClient, url: str, number: int, load: Load, ids: bool) -> list[float]:
    """Live through one trajectory; return the time to the first token of each turn, in seconds."""
    chance, waits_s = random.Random(number), []
    prompt = [5 + (number + place) % 900 for place in range(PROMPT_TOKENS)]
    await asyncio.sleep(chance.uniform(0, load.tool_s))
    for turn in range(load.turns):
        body = {"prompt": prompt, "seed": number, "return_token_ids": True, "stream": True}
        if ids:
            body |= {"trajectory": f"t{number}", "group": f"g{number // SIBLINGS}"}
        began, first_s, written = time.perf_counter(), 0.0, []
        async with http.stream("POST", f"{url}/v1/completions", json=body) as answer:
            answer.raise_for_status()
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    first_s = first_s or time.perf_counter() - began
                    written += msgspec.json.decode(line[6:])["choices"][0]["token_ids"]
        waits_s.append(first_s)
        prompt = [*prompt, *written, *(5 + (turn + place) % 900 for place in range(ANSWER_TOKENS))]
        await asyncio.sleep(load.tool_s * chance.uniform(0.5, 1.5))
    return waits_s


async def live(url: str, load: Load, ids: bool) -> list[float]:
    """Let all trajectories live, and end them; return the times to first tokens, in seconds."""
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as http:
        lives = (trajectory(http, url, number, load, ids) for number in range(load.trajectories))
        found = await asyncio.gather(*lives)
        if ids:
            for group in range(-(-load.trajectories // SIBLINGS)):
                (await http.delete(f"{url}/v1/groups/g{group}")).raise_for_status()
    return [each for waits in found for each in waits]


def run(options: argparse.Namespace) -> list[Row]:
    """Let the trajectories live in each arm, in every round."""
    allow_files()
    load = Load(options.trajectories, options.turns, options.tool_s)
    turns = load.trajectories * load.turns
    found: dict[str, list[tuple[float, float, float]]] = {arm: [] for arm in ARMS}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "seer.toml"
        config.write_text(CONFIG)
        process, url = serve(config)
        try:
            asyncio.run(live(url, Load(8, 2, 0.0), ids=True))
            for _, arm in turned(ARMS, options.rounds):
                before = cpu_s(process.pid)
                waits_s = asyncio.run(live(url, load, arm == "with ids"))
                used_s = cpu_s(process.pid) - before
                p50, p99 = np.percentile(waits_s, (50, 99))
                found[arm].append((1e3 * float(p50), 1e3 * float(p99), 1e3 * used_s / turns))
        finally:
            process.terminate()
            process.wait(60)
    return [
        {
            "arm": arm,
            "trajectories": load.trajectories,
            "turns": load.turns,
            "tool_s": load.tool_s,
            "first_token_p50_ms": spread_of(each[0] for each in rounds),
            "first_token_p99_ms": spread_of(each[1] for each in rounds),
            "cpu_ms_per_turn": spread_of(each[2] for each in rounds),
        }
        for arm, rounds in found.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each arm."""
    names = ("first_token_p50_ms", "first_token_p99_ms", "cpu_ms_per_turn")
    lines = [[row["arm"], *(cell(row[name], ".1f") for name in names)] for row in rows]
    first = rows[0]
    size = f"{first['trajectories']:,} trajectories of {first['turns']} turns, tools of {first['tool_s']:g} s"
    columns = ["turns", "p50 to first token, ms", "p99, ms", "server's CPU per turn, ms"]
    return f"{size}.\n\n{markdown(columns, lines)}"


def answer(rows: Sequence[Row]) -> str:
    """Return how soon a turn has its first token, and its CPU."""
    row = next(row for row in rows if row["arm"] == "with ids")
    p50, p99 = (row[f"first_token_{name}_ms"]["median"] for name in ("p50", "p99"))
    return (
        f"With {row['trajectories']:,} trajectories in tools, `seer serve` begins to answer half of the turns"
        f" within {p50:.0f} ms, and 99 of 100 within {p99:.0f} ms; a turn takes"
        f" {row['cpu_ms_per_turn']['median']:.1f} ms of its CPU."
    )
