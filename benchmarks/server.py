"""What the server costs: CPU of `seer serve` per response and per chunk, beside the library in process.

Engines are simulated, so all CPU is Seer's own and HTTP's; the simulator's is in both.  Responses have about
64 tokens in chunks of 16, and each HTTP request asks for one.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import httpx
import structlog

from seer_core import Runtime

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


def cpu_s(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def ask(url: str, requests: int, at_once: int, stream: bool) -> tuple[float, list[float]]:
    """Send requests, so many at a time; return the seconds taken and those to each first piece."""
    gate, waits = asyncio.Semaphore(at_once), []
    limits = httpx.Limits(max_connections=at_once)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        async with gate:
            began = time.perf_counter()
            body = {"prompt": [5, number % 1000], "seed": number, "stream": stream}
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                first = True
                async for _ in answer.aiter_bytes():
                    if first:
                        waits.append(time.perf_counter() - began)
                        first = False

    async with httpx.AsyncClient(limits=limits, timeout=300) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(requests)))
        return time.perf_counter() - began, waits


def serve(config: Path) -> tuple[subprocess.Popen[str], str]:
    """Start the server; return it and its address."""
    command = [sys.executable, "-c", "from seer_main import main; main()", "serve", str(config)]
    options = ["--port", "0", "--log-level", "warning"]
    process = subprocess.Popen([*command, *options], stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"running on (http://\S+)", line):
            return process, found[1]
    raise SystemExit("the server did not start")


async def in_process(config: Path, requests: int) -> tuple[float, float]:
    """Roll out as many groups of one in process; return CPU seconds, and chunks for each response."""
    async with Runtime.from_config(config) as runtime:
        rollout = runtime.open(keep=False)
        began = time.process_time()
        for number in range(requests):
            record = {
                "prompt_token_ids": [5, number % 1000],
                "n": 1,
                "seed": number,
                "group_id": f"g{number}",
            }
            rollout.add(runtime.groups([record]))
        rollout.close()
        result = await rollout.wait()
        return time.process_time() - began, result.summary.chunks / requests


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--requests", type=int, default=1000, help="of each row")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64, 1000])
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.ERROR))
    config = Path(tempfile.mkdtemp()) / "seer.toml"
    config.write_text(CONFIG)
    count = arguments.requests
    cpu, chunks = asyncio.run(in_process(config, count))
    rows: list[dict[str, Any]] = [{"way": "library", "ms_per_response": 1e3 * cpu / count, "chunks": chunks}]
    process, url = serve(config)
    try:
        asyncio.run(ask(url, 20, 4, False))
        for at_once in arguments.at_once:
            for stream in (False, True):
                before = cpu_s(process.pid)
                seconds, waits = asyncio.run(ask(url, count, at_once, stream))
                rows.append(
                    {
                        "way": f"server, {at_once} at once{', streamed' if stream else ''}",
                        "ms_per_response": 1e3 * (cpu_s(process.pid) - before) / count,
                        "responses_per_s": count / seconds,
                        "median_first_ms": 1e3 * sorted(waits)[len(waits) // 2],
                    }
                )
    finally:
        process.terminate()
        process.wait(60)
    for row in rows:
        print({key: round(value, 2) if isinstance(value, float) else value for key, value in row.items()})
    command = shlex.join(["python", *sys.argv])
    print(f"reproduce: {command}")
    if arguments.json:
        arguments.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
