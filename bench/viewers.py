"""What do a run's page and its viewers cost the run?

`seer run` of the demo's prompts on its two vLLM engines: without a page, with a page that is never opened,
with ten viewers that ask for its figures every two seconds, and with ten that have stopped to read.  The cost
is the driver's own processor time, which is steadier than the run's: the page and its server are threads of
the driver, and workers are other processes.  It is given as a part of the run's time, the start of the
engines included, in which viewers ask too.
"""

from __future__ import annotations

import argparse
import os
import re
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import Request, urlopen

import msgspec

from bench.frame import EXAMPLE, Row, cell, markdown, spread_of, turned

ROOMS = ("cli/seer_cli/report", "seer_core", "backends/worker", "backends/vllm", "examples/tiny_reasoner")
ROUNDS = 5

VIEWERS = 10
EVERY_S = 2.0
"""As the page itself asks."""
NONE, UNSEEN, WATCHED, STUCK = "no page", "a page", "ten viewers", "ten viewers that are stuck"
ARMS = (NONE, UNSEEN, WATCHED, STUCK)
TICKS = os.sysconf("SC_CLK_TCK")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--prompts", type=int, default=16, help="of the demo's (default 16)")


def run(options: argparse.Namespace) -> list[Row]:
    """Roll out in every arm in every round.

    Raises:
        RuntimeError: the arms' responses differ, or a run failed.
    """
    found: dict[str, list[Row]] = {arm: [] for arm in ARMS}
    expected = ""
    for number, arm in turned(list(ARMS), options.rounds):
        row = rolled_out(arm, options)
        found[arm].append(row)
        expected = expected or row["responses"]
        if row["responses"] != expected:
            raise RuntimeError(f"{arm}: other responses than {NONE}")
        print(
            f"round {number + 1}, {arm}: {row['driver_s']:.2f} s of the driver's processor time in"
            f" {row['total_s']:.1f} s, {row['answers']} answers to viewers",
            file=sys.stderr,
            flush=True,
        )
    base = [row["driver_s"] for row in found[NONE]]
    return [
        {
            "arm": arm,
            "rounds": options.rounds,
            "answers": spread_of(row["answers"] for row in rows),
            "total_s": spread_of(row["total_s"] for row in rows),
            "life_s": spread_of(row["life_s"] for row in rows),
            "driver_s": spread_of(row["driver_s"] for row in rows),
            "cost": spread_of(
                (row["driver_s"] - own) / row["life_s"] for row, own in zip(rows, base, strict=True)
            ),
        }
        for arm, rows in found.items()
    ]


def rolled_out(arm: str, options: argparse.Namespace) -> Row:
    """Roll out once; return the seconds that it took, and those of the driver's processor time."""
    seer = Path(sys.executable).with_name("seer")
    with tempfile.TemporaryDirectory() as directory, ExitStack() as viewers:
        out, prompts = Path(directory, "out"), Path(directory, "prompts.jsonl")
        lines = (EXAMPLE / "prompts.jsonl").read_bytes().splitlines(keepends=True)
        prompts.write_bytes(b"".join(lines[: options.prompts]))
        command = [seer, "run", EXAMPLE / "demo.toml", "--prompts", prompts, "--out", out]
        command += [word for each in options.set for word in ("--set", each)]
        command += [] if arm == NONE else ["--dashboard"]
        began_s = time.monotonic()
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
        viewers.callback(process.kill)
        answers = _Answers()
        driver_s = 0.0
        assert process.stderr is not None
        reading = threading.Thread(target=_watch, args=(process, arm, answers, viewers), daemon=True)
        reading.start()
        while process.poll() is None:
            driver_s = max(driver_s, _processor_s(process.pid))
            answers.ended.wait(0.05)
        if process.returncode:
            raise RuntimeError(f"{arm}: the run ended with {process.returncode}")
        answers.ended.set()
        summary = msgspec.json.decode((out / "summary.json").read_bytes())
        completions = sorted((out / "completions.jsonl").read_bytes().splitlines())
        tokens = {line["request_id"]: line["token_ids"] for line in map(msgspec.json.decode, completions)}
        return {
            "total_s": summary["total_time_s"],
            "life_s": time.monotonic() - began_s,
            "driver_s": driver_s,
            "answers": answers.count,
            "responses": repr(sorted(tokens.items())),
        }


class _Answers:
    """How many answers viewers got, and whether the run has ended."""

    def __init__(self) -> None:
        self.count = 0
        self.ended = threading.Event()


def _watch(process: subprocess.Popen[str], arm: str, answers: _Answers, viewers: ExitStack) -> None:
    """Read the run's log to its end, and open the page as the arm says."""
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"dashboard: (http\S+)", line)
        if found and arm == WATCHED:
            for _ in range(VIEWERS):
                threading.Thread(target=_view, args=(found[1], answers), daemon=True).start()
        elif found and arm == STUCK:
            for _ in range(VIEWERS):
                _ask_and_read_nothing(found[1], viewers)


def _view(address: str, answers: _Answers) -> None:
    parts = urlsplit(address)
    request = Request(
        f"http://{parts.netloc}/figures", headers={"X-Seer-Token": parts.query.removeprefix("token=")}
    )
    while not answers.ended.wait(EVERY_S):
        try:
            with urlopen(request, timeout=30) as answer:
                answer.read()
        except OSError:
            return
        answers.count += 1


def _ask_and_read_nothing(address: str, viewers: ExitStack) -> None:
    parts = urlsplit(address)
    connection = socket.create_connection((parts.hostname or "", parts.port or 0), timeout=30)
    viewers.callback(connection.close)
    head = f"GET /?{parts.query} HTTP/1.1\r\nHost: {parts.netloc}\r\n\r\n"
    connection.sendall(head.encode() * 20)


def _processor_s(pid: int) -> float:
    """Return the processor time of all threads of a process so far."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / TICKS


def table(rows: Sequence[Row]) -> str:
    """Return one line for each arm."""
    columns = ["arm", "answers", "rollout, s", "run, s", "driver's processor time, s", "more than without"]
    lines = [
        [
            row["arm"],
            cell(row["answers"], ",.0f"),
            cell(row["total_s"], ",.1f"),
            cell(row["life_s"], ",.1f"),
            cell(row["driver_s"], ",.2f"),
            cell(row["cost"], ".2%"),
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def answer(rows: Sequence[Row]) -> str:
    """Return what the page costs, and its viewers beyond it."""
    cost = {row["arm"]: row["cost"]["median"] for row in rows}
    return (
        f"A page takes {cost[UNSEEN]:.2%} of one core, {cost[WATCHED]:.2%} with ten viewers,"
        f" and {cost[STUCK]:.2%} with ten that have stopped to read. Responses were the same."
    )
