"""Draft server: what it absorbs, how stale engines' copies are, and what its client steals from a step.

Simulated engines, each a process, write --rate tokens per second and request; every group has one request on
each engine, so everybody needs everything.  A token's value is the time it was written, so its age can be
read on arrival.  "Stolen" compares a busy loop in Python beside a client with the same loop without: its
pace, and the time it was blocked, which it is on the GIL only; the latter holds on a noisy machine too.

  python benchmarks/draft_server.py --seconds 10 --json out/draft_server.json
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import os
import queue
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from seer_grouped_spec.client import DraftClient
from seer_grouped_spec.connection import address_of
from seer_grouped_spec.handshake import GREETING_BYTES, WELCOME_BYTES, Handshake
from seer_grouped_spec.process import DraftServerProcess
from seer_grouped_spec.wire import (
    Append,
    Codec,
    Frames,
    FromServer,
    Register,
    StatsAsked,
    Unregister,
    Update,
    Updated,
)

TICKS_PER_S = 10_000
TTL_S = 600.0
IN_FLIGHT = 8
WARM_S = 2.0
SLICE_S = 0.5


def cpu_s(pid: int) -> float:
    """Return the processor time of a process."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Talk:
    """A plain conversation with a server, several messages under way."""

    def __init__(self, server: DraftServerProcess) -> None:
        self.socket = socket.create_connection(address_of(server.endpoint))
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.frames = Frames()
        self.codec: Codec[Any] = Codec(FromServer)
        handshake = Handshake(server.token.encode())
        self.socket.sendall(handshake.hello(self.take(lambda: self.frames.cut(GREETING_BYTES))))
        handshake.welcomed(self.take(lambda: self.frames.cut(WELCOME_BYTES)))

    def take(self, cut: Callable[[], bytes | None]) -> bytes:
        """Receive until there is what is to be cut out."""
        while (data := cut()) is None:
            received = self.socket.recv(1 << 18)
            if not received:
                raise ConnectionError("the server has closed the connection")
            self.frames.add(received)
        return data

    def answer(self) -> bytes:
        """Return the next answer, unread."""
        return self.take(self.frames.next)

    def ask(self, message: Any) -> Any:
        """Say something and return the answer."""
        self.socket.sendall(self.codec.encode(message))
        return self.codec.decode(self.answer())


def absorbed(server: DraftServerProcess, tokens: int, requests: int, seconds: float) -> dict[str, object]:
    """Measure a server on updates of ``requests`` appends of so many tokens, as fast as they go."""
    talk = Talk(server)
    chunk = np.arange(tokens, dtype="<i4").tobytes()

    def frames() -> Iterator[bytes]:
        for step in range(1 << 40):
            prev = step * tokens
            groups = [
                (f"group-{g:04}", [Append(f"group-{g:04}/{r}", prev, chunk) for r in range(8)])
                for g in range(requests // 8)
            ]
            yield Codec.encode(Update.of(step + 1, groups))

    source = frames()
    made = [next(source) for _ in range(max(64, int(16e6 / (tokens * requests))))]
    names = [f"group-{g:04}" for g in range(requests // 8)]
    took = used = 0.0
    count = 0
    while took < seconds:
        talk.ask(Register(1, [(name, TTL_S) for name in names]))
        began, used_before = time.perf_counter(), cpu_s(server.pid or 0)
        for number, frame in enumerate(made):
            talk.socket.sendall(frame)
            if number >= IN_FLIGHT:
                talk.answer()
        for _ in range(IN_FLIGHT):
            answer = talk.codec.decode(talk.answer())
        took += time.perf_counter() - began
        used += cpu_s(server.pid or 0) - used_before
        count += len(made)
        assert isinstance(answer, Updated), answer
        assert not answer.refused, answer.refused[0]
        talk.ask(Unregister(1, names))
    return {
        "what": "absorb",
        "tokens_per_append": tokens,
        "tokens_per_s": count * tokens * requests / took,
        "appends_per_s": count * requests / took,
        "tokens_per_cpu_s": count * tokens * requests / max(used, 0.01),
        "bytes_per_token": len(made[0]) / (tokens * requests),
    }


class Engine:
    """A simulated engine: request ``me`` of every group is its own."""

    def __init__(self, endpoint: str, token: str, me: int, options: argparse.Namespace) -> None:
        self.ages: list[tuple[float, np.ndarray]] = []
        self.keys = [(f"group-{g:04}", f"group-{g:04}/{me}") for g in range(options.requests)]
        self.written = 0
        self.call_s = 0.0
        self.rate = options.rate
        self.base_s = options.base_s
        self.texts: list[int] = []
        self.awake = threading.Event()
        self.awake.set()
        self.client = DraftClient(
            [endpoint],
            deliver=self._deliver,
            text=self._text,
            token=token,
            flush_s=options.flush_s,
            fetch_s=options.fetch_s,
        )
        self.client.start()
        for group_id, _ in self.keys:
            self.client.register_group(group_id, TTL_S)

    def step(self) -> None:
        """Write one token per request."""
        tokens = np.array([(time.monotonic() - self.base_s) * TICKS_PER_S], np.int32)
        self.texts.append(int(tokens[0]))
        appended, written = self.client.appended, self.written
        began = time.perf_counter()
        for group_id, request_id in self.keys:
            appended(group_id, request_id, written, tokens)
        self.call_s += time.perf_counter() - began
        self.written += 1

    def run(self, until: float) -> None:
        """Step at ``rate``, asleep in between."""
        due = time.monotonic()
        while (now := time.monotonic()) < until:
            if now < due:
                time.sleep(due - now)
            due += 1 / self.rate
            self.step()

    def _deliver(self, group_id: str, request_id: str, prev: int, tokens: np.ndarray) -> None:
        self.ages.append((time.monotonic(), tokens))
        self.awake.wait()

    def _text(self, group_id: str, request_id: str, start: int, stop: int) -> np.ndarray:
        return np.array(self.texts[start:stop], np.int32)


def simulate(
    endpoint: str, token: str, me: int, options: argparse.Namespace, seconds: float, results: Any
) -> None:
    """Be an engine for a while; put figures into ``results``."""
    engine = Engine(endpoint, token, me, options)
    engine.run(time.monotonic() + WARM_S)
    engine.ages.clear()
    before, written, call_s, began = engine.client.stats(), engine.written, engine.call_s, time.monotonic()
    engine.run(began + seconds)
    after, took = engine.client.stats(), time.monotonic() - began
    news = list(engine.ages)
    engine.client.stop()
    ages = np.concatenate([(at - engine.base_s) - tokens / TICKS_PER_S for at, tokens in news])
    change = {name: after[name] - before[name] for name in after}
    results.put(
        {
            "ages_ms": np.quantile(ages, np.linspace(0, 1, 1001)) * 1000,
            "bytes_per_token_up": change["bytes_sent"] / max(change["tokens_sent"], 1),
            "bytes_per_token_down": change["bytes_received"] / max(change["tokens_received"], 1),
            "client_cpu": change["cpu_s"] / took,
            "call_us": (engine.call_s - call_s) / (engine.written - written) / len(engine.keys) * 1e6,
            "tokens_received_per_s": change["tokens_received"] / took,
            "troubles": change["resets"] + change["refused"] + change["dropped_tokens"] + change["gaps"],
        }
    )


def start_engines(
    server: DraftServerProcess, first: int, options: argparse.Namespace, seconds: float
) -> tuple[list[Any], Any]:
    """Start simulated engines; return their processes and their results' queue."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    arguments = [
        (server.endpoint, server.token, me, options, seconds, results) for me in range(first, options.engines)
    ]
    processes = [context.Process(target=simulate, args=each) for each in arguments]
    for process in processes:
        process.start()
    return processes, results


def staleness(server: DraftServerProcess, options: argparse.Namespace) -> dict[str, object]:
    """Measure age on arrival, bytes and processor time with all engines at work."""
    processes, results = start_engines(server, 0, options, options.seconds)
    talk = Talk(server)
    rows: list[dict[str, Any]] = []
    figures: dict[str, float] = {"held_bytes": 0, "tokens_in": 1}
    until = time.monotonic() + options.seconds + 120
    while len(rows) < len(processes) and time.monotonic() < until:
        with suppress(queue.Empty):
            rows.append(results.get(timeout=0.25))
        now = talk.ask(StatsAsked(1)).figures
        figures = max(figures, now, key=lambda each: each["held_bytes"])  # it goes with the engines
    for process in processes:
        process.join()
    ages = np.mean([row.pop("ages_ms") for row in rows], axis=0)
    return {
        "what": "staleness",
        "engines": options.engines,
        "requests_per_engine": options.requests,
        "tokens_per_s_and_request": options.rate,
        "flush_s": options.flush_s,
        "fetch_s": options.fetch_s,
        "age_ms_median": float(ages[500]),
        "age_ms_p99": float(ages[990]),
        "age_ms_most": float(ages[1000]),
        **{name: statistics.median(row[name] for row in rows) for name in rows[0] if name != "troubles"},
        "troubles": sum(row["troubles"] for row in rows),
        "server_bytes_per_token": figures["held_bytes"] / figures["tokens_in"],
    }


def scheduled_s() -> float:
    """Return the time that this thread has run, or was ready to."""
    run_ns, ready_ns, _ = Path(f"/proc/self/task/{threading.get_native_id()}/schedstat").read_text().split()
    return (int(run_ns) + int(ready_ns)) / 1e9


def busy(until: float, engine: Engine | None, rate: float) -> tuple[float, float]:
    """Return turns of a loop per second, with an engine's calls in between, and the share blocked."""
    turns, due = 0, time.monotonic()
    scheduled, began = scheduled_s(), time.perf_counter()
    while time.monotonic() < until:
        for number in range(2000):
            number * number
        turns += 1
        if engine is not None and time.monotonic() >= due:
            due += 1 / rate
            engine.step()
    took = time.perf_counter() - began
    return turns / took, 1 - (scheduled_s() - scheduled) / took


def stolen(server: DraftServerProcess, options: argparse.Namespace) -> dict[str, object]:
    """Measure a busy loop with and without a client at work, in turn, while other engines write.

    Without: its thread waits in a delivery, and the loop makes no calls.
    """
    total = WARM_S + options.rounds * 2 * SLICE_S + 10.0
    processes, results = start_engines(server, 1, options, total)
    engine = Engine(server.endpoint, server.token, 0, options)
    engine.run(time.monotonic() + 2 * WARM_S)
    slowdowns, shares, call_s, client_s = [], [], 0.0, 0.0
    for _ in range(options.rounds):
        engine.awake.clear()
        alone, idle = busy(time.monotonic() + SLICE_S, None, options.rate)
        engine.awake.set()
        began, used = engine.call_s, engine.client.stats()["cpu_s"]
        beside, blocked = busy(time.monotonic() + SLICE_S, engine, options.rate)
        call_s += engine.call_s - began
        client_s += engine.client.stats()["cpu_s"] - used
        slowdowns.append(1 - beside / alone)
        shares.append(blocked - idle)
    engine.client.stop()
    for process in processes:
        process.terminate()
        process.join()
    results.close()
    low, middle, high = statistics.quantiles(slowdowns, n=4)
    return {
        "what": "stolen",
        "slowdown_median": middle,
        "slowdown_quartile_1": low,
        "slowdown_quartile_3": high,
        "blocked_median": statistics.median(shares),
        "blocked_mean": statistics.mean(shares),
        "client_cpu": client_s / (options.rounds * SLICE_S),
        "calls": call_s / (options.rounds * SLICE_S),
        "rounds": options.rounds,
    }


async def main(options: argparse.Namespace) -> list[dict[str, object]]:
    """Measure on a fresh server each."""
    rows = []
    measures = [
        *(
            lambda server, n=n: absorbed(server, n, options.requests, options.seconds / 4)
            for n in options.sizes
        ),
        lambda server: staleness(server, options),
        lambda server: stolen(server, options),
    ]
    for number, measure in enumerate(measures):
        server = DraftServerProcess()
        await server.start()
        born = cpu_s(server.pid or 0)
        try:
            rows.append(measure(server))
            if rows[-1]["what"] == "staleness":
                figures = Talk(server).ask(StatsAsked(1)).figures
                rows[-1]["server_cpu_us_per_token"] = (
                    (cpu_s(server.pid or 0) - born) / figures["tokens_in"] * 1e6
                )
        finally:
            await server.stop()
        print(f"measured {number + 1} of {len(measures)}", file=sys.stderr, flush=True)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--engines", type=int, default=8, help="simulated engines (default 8)")
    parser.add_argument("--requests", type=int, default=64, help="requests per engine (default 64)")
    parser.add_argument("--rate", type=float, default=50, help="tokens/s and request (default 50)")
    parser.add_argument(
        "--sizes", type=int, nargs="+", default=[3, 16, 256], help="tokens per append, absorbed"
    )
    parser.add_argument("--flush-s", type=float, default=0.05, help="client's setting (default 0.05)")
    parser.add_argument("--fetch-s", type=float, default=0.1, help="client's setting (default 0.1)")
    parser.add_argument("--seconds", type=float, default=10, help="per measurement (default 10)")
    parser.add_argument("--rounds", type=int, default=40, help="of the busy loop (default 40)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    arguments.base_s = time.monotonic()
    result = asyncio.run(main(arguments))
    for row in result:
        print(f"{row.pop('what')}:")
        for name, value in row.items():
            print(f"  {name:28} {value:14,.3f}" if isinstance(value, float) else f"  {name:28} {value!s:>14}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(result)) + b"\n")
