"""What does `seer serve` cost: CPU per response and per chunk, beside the library in process?

Engines are simulated, so all CPU is Seer's own and HTTP's; the simulator's is in every way.  Responses have
about 64 tokens in chunks of 16.  Every way rolls out the same groups, and as many tokens must come:

  library     in process, `Runtime.open` and `add`, one group at a time
  whole       one request of OpenAI's completions API for each group, answered at its end
  streamed    the same, answered at the ends of chunks
  batch       `seer-client`: all groups in one call, which --at-once does not concern
  rows        `seer-client`: all groups reserved in one call, then one request for each row
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
from seer_client import AsyncClient
from seer_host.viewer_port import allow_files

from bench.frame import Row, cell, markdown, spread_of
from seer_core import Runtime

ROOMS = ("seer_core", "serving/server", "serving/client", "backends/sim")
ROUNDS = 3

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
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
PATIENCE_S = 600.0

Records = list[dict[str, Any]]


def cpu_s(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def at_a_time(at_once: int, tasks: list[Callable[[], Awaitable[int]]]) -> int:
    """Run tasks, so many at a time; return the sum of their results."""
    gate = asyncio.Semaphore(at_once)

    async def one(task: Callable[[], Awaitable[int]]) -> int:
        async with gate:
            return await task()

    return sum(await asyncio.gather(*map(one, tasks)))


async def completions(url: str, records: Records, at_once: int, stream: bool) -> int:
    """Ask for each group by OpenAI's API; return how many tokens came."""

    async def one(http: httpx.AsyncClient, record: dict[str, Any]) -> int:
        body = {
            "prompt": record["prompt_token_ids"],
            "n": record["n"],
            "seed": record["seed"],
            "group": record["group_id"],
            "return_token_ids": True,
            "stream": stream,
        }
        answer = await http.post(f"{url}/v1/completions", json=body)
        answer.raise_for_status()
        if not stream:
            return int(answer.json()["usage"]["completion_tokens"])
        events = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: {")]
        return sum(len(event["choices"][0]["token_ids"]) for event in events)

    # A server closes a connection that is idle for 5 s, and must not do so just as it is used again.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(limits=limits, timeout=PATIENCE_S) as http:
        return await at_a_time(at_once, [lambda each=each: one(http, each) for each in records])


async def batch(url: str, records: Records) -> int:
    """Roll out all groups by one call; return how many tokens came."""
    async with AsyncClient(url) as client:
        return sum([len(each.token_ids) async for each in client.rollout(records)])


async def rows(url: str, records: Records, at_once: int) -> int:
    """Reserve all groups, and request every row; return how many tokens came."""
    async with AsyncClient(url) as client, client.reserve(records):

        async def one(group_id: str, index: int) -> int:
            return len((await client.rollout_row(group_id, index)).token_ids)

        names = [(record["group_id"], index) for record in records for index in range(record["n"])]
        return await at_a_time(at_once, [lambda name=name: one(*name) for name in names])


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


async def in_process(config: Path, records: Records) -> tuple[float, int, int]:
    """Roll the groups out in process; return CPU seconds, tokens and chunks."""
    async with Runtime.from_config(config) as runtime:
        rollout = runtime.open(keep=False)
        began = time.process_time()
        for record in records:
            rollout.add(runtime.groups([record]))
        rollout.close()
        summary = (await rollout.wait()).summary
        return time.process_time() - began, summary.tokens, summary.chunks


def measure(
    process: int, url: str, records: Records, at_once: list[int]
) -> dict[str, tuple[float, float, int]]:
    """Roll the groups out in each way; return the server's CPU seconds, the time taken, and tokens."""
    ways: dict[str, Callable[[], Awaitable[int]]] = {"batch": lambda: batch(url, records)}
    for number in at_once:
        ways[f"whole, {number} at once"] = lambda number=number: completions(url, records, number, False)
        ways[f"streamed, {number} at once"] = lambda number=number: completions(url, records, number, True)
        ways[f"rows, {number} at once"] = lambda number=number: rows(url, records, number)
    found = {}
    for name, way in ways.items():
        before, began = cpu_s(process), time.perf_counter()
        tokens = asyncio.run(_awaited(way))
        found[name] = cpu_s(process) - before, time.perf_counter() - began, tokens
    return found


async def _awaited(way: Callable[[], Awaitable[int]]) -> int:
    return await way()


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--requests", type=int, default=1000, help="groups of each way (default 1000)")
    parser.add_argument("--n", type=int, default=1, help="responses of each group (default 1)")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64, 1000], help="requests at a time")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll the groups out in process and in each way, in every round."""
    allow_files()
    records: Records = [
        {"prompt_token_ids": [5, number % 1000], "n": options.n, "seed": number, "group_id": f"g{number}"}
        for number in range(options.requests)
    ]
    responses = options.requests * options.n
    used: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "seer.toml"
        config.write_text(CONFIG)
        process, url = serve(config)
        try:
            asyncio.run(completions(url, records[:20], 4, True))
            for _ in range(options.rounds):
                cpu, tokens, chunks = asyncio.run(in_process(config, records))
                found = {"library": (cpu, 0.0, tokens), **measure(process.pid, url, records, options.at_once)}
                for way, (seconds, _, written) in found.items():
                    if written != tokens:
                        raise SystemExit(f"{way}: {written} tokens, where the library has {tokens}")
                    used.setdefault(way, []).append(seconds)
        finally:
            process.terminate()
            process.wait(60)
    return [
        {
            "way": way,
            "responses": responses,
            "tokens_per_response": tokens / responses,
            "chunks_per_response": chunks / responses,
            "ms_per_response": spread_of(1e3 * each / responses for each in seconds),
            "ms_per_chunk": spread_of(1e3 * each / chunks for each in seconds),
            "of_library": spread_of(each / base for each, base in zip(seconds, used["library"], strict=True)),
        }
        for way, seconds in used.items()
    ]


def table(rows: Sequence[Row]) -> str:
    """Return one line for each way."""
    first = rows[0]
    lines = [
        [
            row["way"],
            cell(row["ms_per_response"], ".3f"),
            f"{row['ms_per_chunk']['median']:.3f}",
            cell(row["of_library"], ".2f"),
        ]
        for row in rows
    ]
    size = f"{first['responses']:,} responses of {first['tokens_per_response']:.0f} tokens"
    return (
        f"{size} in {first['chunks_per_response']:.1f} chunks; CPU of the process that answers.\n\n"
        + markdown(["way", "ms per response", "ms per chunk", "times the library's"], lines)
    )
