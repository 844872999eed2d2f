"""Do thousands of slow connections to its ports change a run, or the answers of a server?

In turns with a run alone, connections are held to the dashboard and to the figures for Prometheus, so many to
each, and in turns with a server alone, to the server.  A connection sends a part of a request's head, and a
byte every five seconds; one that is closed is opened again after ten.  The engines have no model and write a
token of each response every 20 ms, so the time is that of timers but for what this machine delays.
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import re
import resource
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from seer_host.ports import reserved_port

from bench.driver_deaths import environment_of, prepare
from bench.harness import Row, cell, grouped, markdown, spread_of, turned

DEPENDS_ON = ("host/seer_host", "cli/seer_cli", "serving/server/seer_server", "plugins/prometheus")
ROUNDS = 2
OPENED_IN_S, BYTE_S, AGAIN_S = 5.0, 5.0, 10.0
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched", "prometheus"]
engine = "no_model"
[engine.no_model]
token_s = 0.02
[plugin.divided_rollout]
chunk_tokens = 32
[plugin.prometheus]
port = {port}
[rollout]
n = 8
max_tokens = 900
"""
SEER = "from seer_main import main; main()"
HOLDER = "import sys; from bench.slow_viewers import hold; hold(int(sys.argv[1]), *map(int, sys.argv[2:]))"


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--connections", type=int, default=10_000, help="to each port (default 10,000)")


def run(options: argparse.Namespace) -> list[Row]:
    """Run and serve, each alone and beside connections."""
    rows = []
    for number, (kind, held) in turned([*_arms()], options.rounds):
        with tempfile.TemporaryDirectory() as folder:
            measured = _run if kind == "a run" else _serve
            found = measured(Path(folder), options.connections if held else 0)
        rows.append({"kind": kind, "connections": options.connections * held, **found})
        print(f"round {number + 1}: {rows[-1]}", file=sys.stderr, flush=True)
    return rows


def _arms() -> Iterator[tuple[str, bool]]:
    for kind in ("a run", "a server"):
        yield kind, False
        yield kind, True


def hold(count: int, *ports: int) -> None:
    """Keep slow connections to these ports until standard input ends, then print how many there have been."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    began = time.monotonic()
    due = [(began + OPENED_IN_S * n / count, port, n) for n in range(count) for port in ports]
    heapq.heapify(due)
    live, opened, byte_s, most = selectors.DefaultSelector(), 0, began + BYTE_S, 0
    live.register(sys.stdin, selectors.EVENT_READ, None)
    while True:
        while due and due[0][0] <= time.monotonic():
            opened += _open(live, due)
        most = max(most, len(live.get_map()) - 1)
        next_s = min(byte_s, due[0][0] if due else byte_s)
        for key, _ in live.select(max(0.0, next_s - time.monotonic())):
            if key.data is None:
                print(json.dumps({"opened": opened, "most": most}), flush=True)
                return
            if not _reads(key.fileobj):
                live.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                heapq.heappush(due, (time.monotonic() + AGAIN_S, *key.data))
        if time.monotonic() >= byte_s:
            byte_s += BYTE_S
            for key in list(live.get_map().values()):
                if key.data is not None:
                    _reads(key.fileobj, sends=True)


def _open(live: selectors.BaseSelector, due: list[tuple[float, int, int]]) -> bool:
    """Open the connection that is due, or try again later; return whether it was opened."""
    _, port, number = heapq.heappop(due)
    try:
        each = socket.create_connection(("127.0.0.1", port), 5)
        each.setblocking(False)
        each.send(b"GET /metrics HTTP/1.1\r\nX-Slow: "[: 1 + number % 30])
    except OSError:
        heapq.heappush(due, (time.monotonic() + AGAIN_S, port, number))
        return False
    live.register(each, selectors.EVENT_READ, (port, number))
    return True


def _reads(connection: Any, *, sends: bool = False) -> bool:
    try:
        return bool(connection.send(b"x") if sends else connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


@contextmanager
def _held(count: int, *ports: int) -> Iterator[dict[str, int]]:
    """Hold connections while the ``with`` block runs; what there has been of them is there after it."""
    found: dict[str, int] = {}
    if not count:
        yield found
        return
    command = [sys.executable, "-c", HOLDER, str(count), *map(str, ports)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as holder:
        try:
            yield found
        finally:
            found |= json.loads(holder.communicate("\n")[0])


@contextmanager
def _seer(
    folder: Path, line: str, *arguments: str
) -> Iterator[tuple[subprocess.Popen[bytes], re.Match[str]]]:
    """Start a command, and wait for a line of its log."""
    log = folder / "log"
    command = [sys.executable, "-c", SEER, arguments[0], str(folder / "seer.toml"), *arguments[1:]]
    with (
        log.open("w") as stderr,
        subprocess.Popen(
            command, stderr=stderr, stdout=subprocess.DEVNULL, env=environment_of(folder)
        ) as process,
    ):
        while not (found := re.search(line, log.read_text())):
            if process.poll() is not None:
                raise RuntimeError(f"it ended with {process.returncode}: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        try:
            yield process, found
        finally:
            process.terminate()


def _run(folder: Path, connections: int) -> Row:
    with reserved_port() as port:
        prepare(folder, CONFIG.format(port=port))
        prompts = "--prompts", str(folder / "prompts.jsonl"), "--out", str(folder / "out")
        page = r"dashboard: http://[^:]+:(\d+)"
        with (
            _seer(folder, page, "run", *prompts, "--dashboard") as (process, found),
            _held(connections, int(found[1]), port) as holder,
        ):
            status = process.wait()
    assert status == 0, (folder / "log").read_text()[-2000:]
    lines = map(json.loads, (folder / "out" / "completions.jsonl").read_text().splitlines())
    tokens = {each["request_id"]: each["token_ids"] for each in lines}
    summary = json.loads((folder / "out" / "summary.json").read_text())
    return {"seconds": summary["total_time_s"], "tokens": _digest(tokens), **holder}


def _serve(folder: Path, connections: int) -> Row:
    token = secrets.token_hex(32)
    (folder / "token").touch(0o600)
    (folder / "token").write_text(token)
    with reserved_port() as port:
        prepare(folder, CONFIG.format(port=port))
        arguments = "--port", "0", "--token-file", str(folder / "token")
        with (
            _seer(folder, r"running on (http://[^:]+:(\d+))", "serve", *arguments) as (_, found),
            _held(connections, int(found[2]), port) as holder,
            ThreadPoolExecutor(12) as threads,
        ):
            began_s = time.perf_counter()
            tokens = dict(enumerate(threads.map(partial(_ask, found[1], token), range(12))))
            seconds = time.perf_counter() - began_s
    return {"seconds": seconds, "tokens": _digest(tokens), **holder}


def _ask(url: str, token: str, number: int) -> list[list[int]]:
    body = {"prompt": [5, number], "group": str(number), "n": 8, "max_tokens": 900, "return_token_ids": True}
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {token}"}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=600) as answer:
        return [each["token_ids"] for each in json.loads(answer.read())["choices"]]


def _digest(tokens: Mapping[Any, Any]) -> str:
    return hashlib.sha256(repr(sorted(tokens.items())).encode()).hexdigest()[:16]


def table(rows: Sequence[Row]) -> str:
    """Return a line for each kind, alone and beside connections."""
    columns = ["kind", "connections to each port", "most at a time", "opened in all", "seconds", "tokens"]
    lines = []
    for kind, counts in grouped(rows, "kind", "connections").items():
        for count, same in counts.items():
            most, opened = (max(row.get(key, 0) for row in same) for key in ("most", "opened"))
            found = {row["tokens"] for row in rows if row["kind"] == kind}
            seconds = cell(spread_of(row["seconds"] for row in same), ",.2f")
            equal = "the same" if len(found) == 1 else "differ"
            lines.append([kind, f"{count:,}", f"{most:,}", f"{opened:,}", seconds, equal])
    return markdown(columns, lines)


def answer(rows: Sequence[Row]) -> str:
    """Return the times alone and beside connections."""
    sentences = []
    for kind, counts in grouped(rows, "kind", "connections").items():
        alone, beside = (
            cell(spread_of(row["seconds"] for row in counts[each]), ",.2f", " s") for each in sorted(counts)
        )
        same = len({row["tokens"] for each in counts.values() for row in each}) == 1
        work = "the rollout" if kind == "a run" else "12 requests of 8 responses"
        sentences.append(
            f"For {kind}, {work} takes {alone} alone and {beside} beside {max(counts):,} slow connections to"
            f" each port, with {'the same' if same else 'other'} tokens."
        )
    return " ".join(sentences)
