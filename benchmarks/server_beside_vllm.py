"""`seer serve` beside vLLM's own OpenAI server and beside the library, on the same prompts and in turns.

The ways, each with its number of instances: `vllm`, whose servers the client takes in turns; `seer`, one
server of Seer's; `library`, a `Runtime` in this process, without HTTP.  Every way runs alone, so that none
takes another's cores, and once in each of ``--repeat`` rounds.  Each request is for one response, which is
streamed, and ends by itself or after ``--tokens`` tokens.  Seeds mean other tokens to vLLM, so lengths are
alike and not equal.

CPU is that of the processes that answer HTTP, or of this one: engines are others, with vLLM as with Seer.
The first text is a server's first event, and in the library the first piece of which an observer hears.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import shlex
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import structlog
from seer_server.process import allow_files

from seer_core import Runtime
from seer_core.events import ChunkFinished, Command, Event
from seer_core.model import Completion, Piece

WEIGHTS = Path(__file__).parents[1] / "examples/tiny_reasoner/weights"
PROMPTS = WEIGHTS.parent / "prompts.jsonl"
TICKS_PER_S = os.sysconf("SC_CLK_TCK")
KV_BYTES = 33_554_432
WAYS = ["vllm-1", "seer-1", "library-1", "vllm-2", "seer-2", "library-2"]
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "vllm"
[engine.vllm]
model = "{weights}"
dtype = "float32"
instances = {instances}
threads = 1
kv_cache_bytes = {kv_bytes}
max_model_tokens = 3200
max_running = 128
start_timeout_s = {patience_s}
[plugin.divided_rollout]
chunk_tokens = 64
"""


@contextmanager
def server(command: list[str], port: int, patience_s: float, log: Path) -> Iterator[tuple[int, str]]:
    """Start a server and wait until it is well; give its process and address, and end it."""
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "OMP_NUM_THREADS": "1"}
    with log.open("ab") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, env=environment)
    url = f"http://127.0.0.1:{port}"
    try:
        end = time.monotonic() + patience_s
        while True:
            if process.poll() is not None or time.monotonic() > end:
                raise SystemExit(f"{shlex.join(command)} did not start; look into {log}")
            try:
                if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.5)
        yield process.pid, url
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(60)


def vllm_command(port: int) -> list[str]:
    """Return the command of vLLM's own server."""
    return [
        sys.executable,  # the command `vllm` needs a distribution of that name
        *("-m", "vllm.entrypoints.openai.api_server", "--model", str(WEIGHTS)),
        *("--served-model-name", "seer", "--host", "127.0.0.1", "--port", str(port)),
        *("--generation-config", "vllm"),  # or it would sample by the model's own settings
        *("--dtype", "float32", "--max-model-len", "3200", "--max-num-seqs", "128"),
        *("--kv-cache-memory-bytes", str(KV_BYTES), "--disable-uvicorn-access-log"),
    ]


def seer_command(config: Path, port: int) -> list[str]:
    """Return the command of Seer's server."""
    code = "from seer_main import main; main()"
    return [sys.executable, "-c", code, "serve", str(config), "--port", str(port), "--log-level", "warning"]


def free_port() -> int:
    """Return a port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(process: int) -> float:
    """Return the CPU time that a process has used."""
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_S


async def ask(urls: list[str], requests: int, at_once: int, tokens: int, salt: int) -> dict[str, float]:
    """Send requests, so many at a time and to each address in turn; return what was seen of them."""
    gate, written = asyncio.Semaphore(at_once), 0
    firsts: list[float] = []
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]

    async def one(client: httpx.AsyncClient, number: int) -> None:
        nonlocal written
        body: dict[str, Any] = {
            "model": "seer",
            "prompt": prompts[(salt + number) % len(prompts)],
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": salt + number,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        async with gate:
            began, seen = time.perf_counter(), False
            url = urls[number % len(urls)]
            async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
                answer.raise_for_status()
                async for line in answer.aiter_lines():
                    if not line.startswith("data: {"):
                        continue
                    if not seen:
                        firsts.append(time.perf_counter() - began)
                        seen = True
                    used = json.loads(line[6:]).get("usage")
                    written += used["completion_tokens"] if used else 0

    # A server closes a connection that is idle for 5 s, and must not do so just as it is used again.
    limits = httpx.Limits(max_connections=at_once, max_keepalive_connections=None, keepalive_expiry=2.0)
    async with httpx.AsyncClient(limits=limits, timeout=900) as client:
        began = time.perf_counter()
        await asyncio.gather(*(one(client, number) for number in range(requests)))
        seconds = time.perf_counter() - began
    return {"tokens": written, "tokens_per_s": written / seconds, "first_ms": 1e3 * statistics.median(firsts)}


class Firsts:
    """An observer that notes when each response has written its first piece, or its first chunk."""

    def __init__(self) -> None:
        self.at: dict[str, float] = {}

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Note a chunk's end."""
        if type(event) is ChunkFinished:
            self.at.setdefault(event.request_id, time.perf_counter())

    def grew(self, now: float, piece: Piece) -> None:
        """Note a piece."""
        self.at.setdefault(piece.request_id, time.perf_counter())


async def roll_out(
    runtime: Runtime, firsts: Firsts, requests: int, at_once: int, tokens: int, salt: int
) -> dict[str, float]:
    """Roll out in process what ``ask`` asks a server for, so many at a time; return the same figures."""
    gate, written, waits = asyncio.Semaphore(at_once), 0, []
    prompts = [json.loads(line)["prompt"] for line in PROMPTS.read_text().splitlines()]
    over: dict[str, asyncio.Future[Completion]] = {}
    rollout = runtime.open(keep=False)

    async def read() -> None:
        async for completion in rollout:
            over.pop(completion.group_id).set_result(completion)

    async def one(number: int) -> None:
        nonlocal written
        record = {
            "prompt": prompts[(salt + number) % len(prompts)],
            "n": 1,
            "max_tokens": tokens,
            "temperature": 1.0,
            "seed": salt + number,
            "group_id": f"{salt + number}",
        }
        async with gate:
            began = time.perf_counter()
            done = over[record["group_id"]] = asyncio.get_running_loop().create_future()
            [group] = runtime.groups([record])
            rollout.add([msgspec.structs.replace(group, streams=True)])
            completion = await done
            waits.append(firsts.at.pop(completion.request_id) - began)
            written += len(completion.token_ids)

    reading = asyncio.create_task(read())
    began = time.perf_counter()
    await asyncio.gather(*(one(number) for number in range(requests)))
    seconds = time.perf_counter() - began
    rollout.close()
    await reading
    return {"tokens": written, "tokens_per_s": written / seconds, "first_ms": 1e3 * statistics.median(waits)}


async def in_process(config: Path, arguments: argparse.Namespace, salt: int) -> list[dict[str, Any]]:
    """Start the engines, roll out each load, end them."""
    firsts, rows = Firsts(), []
    async with Runtime.from_config(config, [firsts]) as runtime:
        await roll_out(runtime, firsts, 2 * len(runtime.living), 2, 8, salt)
        for at_once in arguments.at_once:
            requests = requests_of(arguments, at_once)
            before = time.process_time()
            row = await roll_out(runtime, firsts, requests, at_once, arguments.tokens, salt)
            used = time.process_time() - before
            rows.append({"at_once": at_once, **row, "cpu_ms_per_request": 1e3 * used / requests})
    return rows


def requests_of(arguments: argparse.Namespace, at_once: int) -> int:
    """Return how many requests a load has."""
    return int(max(at_once, arguments.requests) if at_once > 1 else arguments.alone)


def measure(way: str, arguments: argparse.Namespace, folder: Path, salt: int) -> list[dict[str, Any]]:
    """Start what a way needs, have it do each load, end it."""
    name, count = way.split("-")
    config, patience_s = folder / f"{way}.toml", arguments.patience_s
    config.write_text(
        CONFIG.format(weights=WEIGHTS, instances=count, kv_bytes=KV_BYTES, patience_s=patience_s)
    )
    if name == "library":
        return [{"way": way, **row} for row in asyncio.run(in_process(config, arguments, salt))]
    if name == "seer":
        ports = [free_port()]
        commands = [seer_command(config, ports[0])]
    else:
        ports = [free_port() for _ in range(int(count))]
        commands = [vllm_command(port) for port in ports]
    rows = []
    with ExitStack() as running:
        servers = [
            running.enter_context(server(command, port, arguments.patience_s, folder / f"{way}.log"))
            for command, port in zip(commands, ports, strict=True)
        ]
        urls = [url for _, url in servers]
        asyncio.run(ask(urls, 2 * len(urls), 2, 8, salt))
        for at_once in arguments.at_once:
            requests = requests_of(arguments, at_once)
            before = sum(cpu_s(process) for process, _ in servers)
            row = asyncio.run(ask(urls, requests, at_once, arguments.tokens, salt))
            used = sum(cpu_s(process) for process, _ in servers) - before
            rows.append({"way": way, "at_once": at_once, **row, "cpu_ms_per_request": 1e3 * used / requests})
    return rows


def main() -> None:
    """Measure in turns, and print medians, least and most."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example: python benchmarks/server_beside_vllm.py --at-once 1 64 1000 --json out/beside.json",
    )
    parser.add_argument("--ways", nargs="+", default=WAYS, metavar="WAY")
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--requests", type=int, default=128, help="of a load of several at once")
    parser.add_argument("--alone", type=int, default=16, help="requests of the load of one at a time")
    parser.add_argument("--tokens", type=int, default=128, help="that a response may have")
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--patience-s", type=float, default=600.0, help="for a server to start")
    parser.add_argument("--json", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    allow_files()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    folder = Path(tempfile.mkdtemp())
    rows: list[dict[str, Any]] = []
    for repetition in range(arguments.repeat):
        turn = repetition % len(arguments.ways)
        for way in arguments.ways[turn:] + arguments.ways[:turn]:
            for row in measure(way, arguments, folder, 10_000 * repetition):
                rows.append({"round": repetition, **row})
                print(json.dumps(rows[-1]), flush=True)
    print(f"{'way':10} {'at once':>7}   tokens/s   first, ms   CPU of the server, ms per request")
    for way in arguments.ways:
        for at_once in arguments.at_once:
            mine = [row for row in rows if (row["way"], row["at_once"]) == (way, at_once)]
            cells = [
                f"{statistics.median(values):.1f} ({min(values):.1f} to {max(values):.1f})"
                for key in ("tokens_per_s", "first_ms", "cpu_ms_per_request")
                for values in [[row[key] for row in mine]]
            ]
            print(f"{way:10} {at_once:7}   {'   '.join(cells)}")
    command = shlex.join(["python", *sys.argv])
    print(f"reproduce: {command}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
