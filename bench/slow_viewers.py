"""Whether 10,000 slow connections to each port of a run change its time, in turns with the run alone.

The run is of the emulated accelerator on the real clock, so its time is virtual but for what this machine
delays.  Each connection sends half of a request's head, and a byte every five seconds; one that is closed is
opened again after ten.

    python -m bench.slow_viewers --rounds 3
"""

from __future__ import annotations

import argparse
import hashlib
import heapq
import json
import os
import re
import resource
import selectors
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

CONNECTIONS = 10_000
OPENED_IN_S, BYTE_S, AGAIN_S = 5.0, 5.0, 10.0
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched", "prometheus"]
engine = "paced"
[engine.paced]
preset = "h100-qwen3-32b-tp4"
clock = "real"
instances = 2
kv_capacity_tokens = 16384
max_model_tokens = 4096
lengths = {{ mean_tokens = 700, sigma = 0.8, group_share = 0.8, cap_tokens = 3000 }}
[rollout]
n = 8
max_tokens = 3000
[plugin.prometheus]
port = {port}
"""


def hold(ports: list[int]) -> None:
    """Keep slow connections to these ports until SIGTERM, then print how many there have been."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    stopped: list[int] = []
    signal.signal(signal.SIGTERM, lambda number, _: stopped.append(number))
    began = time.monotonic()
    due = [(began + OPENED_IN_S * n / CONNECTIONS, port, n) for n in range(CONNECTIONS) for port in ports]
    heapq.heapify(due)
    live, opened, byte_s = selectors.DefaultSelector(), 0, began + BYTE_S
    while not stopped:
        while due and due[0][0] <= time.monotonic():
            _, port, number = heapq.heappop(due)
            try:
                each = socket.create_connection(("127.0.0.1", port), 5)
                each.setblocking(False)
                each.send(b"GET /metrics HTTP/1.1\r\nX-Slow: "[: 1 + number % 30])
            except OSError:
                heapq.heappush(due, (time.monotonic() + AGAIN_S, port, number))
            else:
                opened += 1
                live.register(each, selectors.EVENT_READ, (port, number))
        next_s = min(byte_s, due[0][0] if due else byte_s)
        for key, _ in live.select(max(0.0, next_s - time.monotonic())):
            if not _reads(key.fileobj):
                live.unregister(key.fileobj)
                key.fileobj.close()  # type: ignore[union-attr]
                heapq.heappush(due, (time.monotonic() + AGAIN_S, *key.data))
        if time.monotonic() >= byte_s:
            byte_s += BYTE_S
            for key in list(live.get_map().values()):
                _reads(key.fileobj, sends=True)
    print(json.dumps({"opened": opened, "cpu_s": sum(os.times()[:2])}), flush=True)


def _reads(connection: Any, *, sends: bool = False) -> bool:
    try:
        return bool(connection.send(b"x") if sends else connection.recv(4096))
    except BlockingIOError:
        return True
    except OSError:
        return False


def run(folder: Path, *, held: bool) -> dict[str, Any]:
    """Run once; return its time, what it cost, and a digest of its tokens."""
    with socket.socket() as reserved:
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind(("127.0.0.1", 0))
        port = reserved.getsockname()[1]
        (folder / "run.toml").write_text(CONFIG.format(port=port))
        prompts = (json.dumps({"prompt": f"p{n}", "group_id": f"g{n}"}) for n in range(12))
        (folder / "prompts.jsonl").write_text("\n".join(prompts))
        out, log = folder / "out", folder / "log"
        seer = "from seer_main import main; main()"
        command = ["-c", seer, "run", folder / "run.toml", "--prompts", folder / "prompts.jsonl"]
        with log.open("w") as stderr:
            process = subprocess.Popen(
                [sys.executable, *command, "--out", out, "--dashboard"],
                stderr=stderr,
                stdout=subprocess.DEVNULL,
            )
        while not (page := re.search(r"dashboard: http://[^:]+:(\d+)", log.read_text())):
            time.sleep(0.05)
        holder = None
        if held:
            own = [sys.executable, "-m", "bench.slow_viewers", "--hold", page[1], str(port)]
            holder = subprocess.Popen(own, stdout=subprocess.PIPE, text=True)
        _, status, usage = os.wait4(process.pid, 0)
        found: dict[str, Any] = {"held": held, "status": status, "cpu_s": usage.ru_utime + usage.ru_stime}
        if holder is not None:
            holder.terminate()
            found["holder"] = json.loads(holder.communicate()[0])
        summary = json.loads((out / "summary.json").read_text())
        lines = map(json.loads, (out / "completions.jsonl").read_text().splitlines())
        tokens = sorted((each["request_id"], each["token_ids"]) for each in lines)
        found["total_time_s"] = summary["total_time_s"]
        found["tokens"] = hashlib.sha256(repr(tokens).encode()).hexdigest()[:16]
        return found


def main() -> None:
    """Run in turns, and print each run and the answer."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--hold", type=int, nargs="+")
    asked = parser.parse_args()
    if asked.hold:
        hold(asked.hold)
        return
    runs: list[dict[str, Any]] = []
    for number in range(asked.rounds):
        for held in (False, True) if number % 2 == 0 else (True, False):
            with tempfile.TemporaryDirectory() as folder:
                runs.append(run(Path(folder), held=held))
            print(json.dumps(runs[-1]), flush=True)
    times = [[each["total_time_s"] for each in runs if each["held"] == held] for held in (False, True)]
    alone, beside = map(statistics.median, times)
    print(f"{alone:.2f} s alone {times[0]}, {beside:.2f} s beside connections {times[1]}")
    assert len({each["tokens"] for each in runs}) == 1


if __name__ == "__main__":
    main()
