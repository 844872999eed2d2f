"""What do ten thousand requests in flight on servers cost one driver?

The driver's CPU, memory, threads and descriptors.  Stand-ins hold all requests until all are there.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any

import attrs
import psutil
from seer_divided_rollout import Chunks, KvAware
from seer_host.ports import reserved_port
from seer_host.tables import SeerTable
from seer_remote.plugin import Settings, seer_make_engines
from seer_session import Runtime

from bench.harness import Row
from seer_core.plugins.hookspecs import Startup
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.scheduling.scheduler import Policies, Slot

DEPENDS_ON = ("seer_core", "plugins", "backends/remote")
ROUNDS = 1

SERVERS, PROMPT_TOKENS, CHUNK_TOKENS, MAX_TOKENS = 4, 512, 64, 128
MOST_S = 240.0
"""How long the stand-ins hold chunks at most: Seer takes a server for lost that writes nothing for 300 s."""
LOOK_S = 0.2

FOLDER = str(Path(__file__).parents[1] / "backends" / "remote" / "tests")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
fake_servers: Any = importlib.import_module("fake_servers")


class HoldingServer(fake_servers.FakeVllm):  # type: ignore[misc]
    """Holds its chunks from when it is asked to until all are in flight."""

    def __init__(self, port: int, hold: Event, go: Event, held: Any) -> None:
        super().__init__()
        self.release()
        self._port = port
        self.max_model_len = 4096
        self.backlog = 4096
        self._hold, self._go, self._held = hold, go, held
        self._gone = asyncio.Event()

    async def look(self) -> None:
        """Wait until all are in flight."""
        while not self._go.is_set():
            await asyncio.sleep(LOOK_S)
        self._gone.set()

    async def _write(self, name: str, body: Any, context: list[int], how: Any) -> Any:
        self.store.clear()
        self.requests.clear()
        if self._hold.is_set() and not self._gone.is_set():
            self.running.add(name)
            self._held.value += 1
            await self._gone.wait()
        return await super()._write(name, body, context, how)


def _run(port: int, hold: Event, go: Event, held: Any) -> None:
    async def serve() -> None:
        server = HoldingServer(port, hold, go, held)
        await server.start()
        await server.look()
        await asyncio.Event().wait()

    asyncio.run(serve())


async def _roll(settings: Settings, requests: int, hold: Event, go: Event, held: Sequence[Any]) -> Row:
    fleet = await asyncio.to_thread(seer_make_engines, settings, Startup(0, Path()))
    policies = attrs.evolve(
        Policies(),
        splitter=Slot("splitter", "mine", Chunks(CHUNK_TOKENS)),
        placer=Slot("placer", "mine", KvAware(0.25, 0.75)),
    )
    prompts = [
        {"group_id": f"g{i}", "prompt_token_ids": [i % 90] * PROMPT_TOKENS, "n": 8, "max_tokens": MAX_TOKENS}
        for i in range(requests // 8)
    ]
    process = psutil.Process()
    async with Runtime(Assembly(fleet, Strategies(policies)), SeerTable()) as runtime:
        while len(runtime.alive) < SERVERS:
            await asyncio.sleep(LOOK_S)
        hold.set()  # the measurements of the start are over
        before, began_s, rss = time.process_time(), time.monotonic(), process.memory_info().rss
        rollout = runtime.rollout(runtime.groups(prompts))
        waiting = asyncio.create_task(rollout.wait())
        most: Row = {"in_flight": 0, "descriptors": 0, "threads": 0, "rss_bytes": 0}
        while not waiting.done():
            await asyncio.sleep(LOOK_S)
            now: Row = {
                "in_flight": sum(each.value for each in held),
                "descriptors": process.num_fds(),
                "threads": threading.active_count(),
                "rss_bytes": process.memory_info().rss,
            }
            most = {name: max(most[name], value) for name, value in now.items()}
            if not go.is_set() and (now["in_flight"] >= requests or time.monotonic() - began_s > MOST_S):
                sent_s, sent_cpu_s = time.monotonic() - began_s, time.process_time() - before
                go.set()
        result = waiting.result()
        cpu_s = time.process_time() - before
    return {
        **most,
        "requests": len(result.completions),
        "chunks": result.summary.chunks,
        "cpu_s": cpu_s,
        "sent_s": sent_s,
        "sent_cpu_s": sent_cpu_s,
        "wall_s": time.monotonic() - began_s,
        "rss_before_bytes": rss,
        "prompt_tokens": PROMPT_TOKENS,
        "chunk_tokens": CHUNK_TOKENS,
        "servers": SERVERS,
    }


def options(parser: argparse.ArgumentParser) -> None:
    """Add the part's own options."""
    parser.add_argument("--requests", type=int, default=10_000, help="in flight (default 10000)")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll them out, and return the driver's figures."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    context = multiprocessing.get_context("fork")
    hold, go, requests = context.Event(), context.Event(), options.requests
    with ExitStack() as stack:
        ports = [stack.enter_context(reserved_port()) for _ in range(SERVERS)]
        held = [context.Value("i", 0) for _ in ports]
        for port, count in zip(ports, held, strict=True):
            server = context.Process(target=_run, args=(port, hold, go, count), daemon=True)
            server.start()
            stack.callback(server.kill)
        settings = Settings(
            urls=tuple(f"http://127.0.0.1:{port}" for port in ports),
            max_running=requests // SERVERS + 100,
            kv_tokens=requests // SERVERS * 1024,
            poll_s=5.0,
        )
        return [asyncio.run(_roll(settings, requests, hold, go, held))]


def table(rows: Sequence[Row]) -> str:
    """Return a sentence for each row."""
    return "\n\n".join(
        f"{row['in_flight']:,} requests in flight on one driver: {row['threads']} threads,"
        f" {row['descriptors']:,} descriptors,"
        f" {(row['rss_bytes'] - row['rss_before_bytes']) / row['in_flight'] / 1e3:.0f} kB each;"
        f" {1e3 * row['cpu_s'] / row['chunks']:.2f} ms of CPU for a chunk of {row['chunk_tokens']} tokens"
        f" after {row['prompt_tokens']}, in {row['chunks']:,} chunks."
        for row in rows
    )


def answer(rows: Sequence[Row]) -> str:
    """Return what a chunk costs with all requests in flight."""
    [row] = rows
    return (
        f"One driver has {row['in_flight']:,} requests in flight with {row['threads']} threads, and spends"
        f" {1e3 * row['cpu_s'] / row['chunks']:.1f} ms of CPU on a chunk."
    )
