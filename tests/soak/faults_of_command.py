"""Faults of `seer run` itself: signals to it, and a disk that is full."""

from __future__ import annotations

import asyncio
import os
import random
import resource
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

import attrs
import msgspec
import psutil

from .fault_kinds import children

__all__ = ["COMMAND_KINDS", "EndedCommand", "run_command"]

SIGNALS = {"SIGINT": signal.SIGINT, "SIGTERM": signal.SIGTERM, "SIGKILL": signal.SIGKILL}
FULL_DISK = "full disk"
COMMAND_KINDS = (*SIGNALS, FULL_DISK)
STATUSES = {"SIGINT": 130, "SIGTERM": 143, "SIGKILL": -signal.SIGKILL, FULL_DISK: 2}
AFTER_S = (0.0, 20.0)
MIDWAY_AFTER_S = (0.0, 2.0)
"""Half of the signals come so long after the first completion, however long the start took."""
LEAST_DISK_BYTES, MOST_DISK_BYTES = 1, 200_000
GONE_WITHIN_S = 30.0


@attrs.define
class EndedCommand:
    """How a command ended: its status, the completions that it had written, and complaints."""

    status: int | None
    seconds: float
    completions: list[tuple[str, list[int]]]
    complaints: list[str]


async def run_command(
    kind: str,
    overrides: list[str],
    config: Path,
    prompts: Path,
    out: Path,
    chance: random.Random,
    bound_s: float,
) -> EndedCommand:
    """Run `seer run` with this fault at a random time, and check the files and processes that it leaves."""
    begun = time.monotonic()
    process = await asyncio.create_subprocess_exec(
        *(
            str(Path(sys.executable).with_name("seer")),
            "run",
            str(config),
            "--prompts",
            str(prompts),
            "--out",
            str(out),
        ),
        *(word for override in overrides for word in ("--set", override)),
        stdout=asyncio.subprocess.DEVNULL,
        stderr=asyncio.subprocess.PIPE,
    )
    output = asyncio.ensure_future(process.communicate())
    complaints: list[str] = []
    started: list[psutil.Process] = []
    try:
        async with asyncio.timeout(bound_s):
            if kind == FULL_DISK:
                started = await fill_disk(process, out, chance)
            else:
                midway = chance.random() < 0.5
                if midway:
                    await first_completion(process, out)
                after_s = chance.uniform(*(MIDWAY_AFTER_S if midway else AFTER_S))
                await asyncio.wait([output], timeout=after_s)
                started = children(process.pid)
                with suppress(ProcessLookupError):
                    process.send_signal(SIGNALS[kind])
            _, errors = await asyncio.shield(output)
            if b"Traceback" in errors or process.returncode == 1:
                complaints.append(f"stderr ends with {errors[-300:]!r}")
    except TimeoutError:
        complaints.append(f"still there after {bound_s:g} s")
        process.kill()
        await output
    except asyncio.CancelledError:  # the campaign itself is being ended
        process.terminate()
        await process.wait()
        raise
    if process.returncode not in (0, STATUSES[kind]):
        complaints.append(f"ended with {process.returncode}, not with {STATUSES[kind]}")
    gone, alive = await asyncio.to_thread(psutil.wait_procs, started, GONE_WITHIN_S)
    if alive:
        complaints.append(f"left {len(alive)} of {len(gone) + len(alive)} processes")
        for each in alive:
            each.kill()
    read(out / "trace.jsonl", complaints)
    completions = [
        (str(line["request_id"]), list(line["token_ids"]))
        for line in read(out / "completions.jsonl", complaints)
    ]
    return EndedCommand(process.returncode, time.monotonic() - begun, completions, complaints)


async def fill_disk(
    process: asyncio.subprocess.Process, out: Path, chance: random.Random
) -> list[psutil.Process]:
    """Let no file of the command grow beyond a random size, once its engines are up; return its children."""
    await first_completion(process, out)
    started = children(process.pid)
    size = chance.randint(LEAST_DISK_BYTES, MOST_DISK_BYTES)
    with suppress(ProcessLookupError):
        resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
    return started


async def first_completion(process: asyncio.subprocess.Process, out: Path) -> None:
    """Wait until the command has written one, or is over."""
    completions = out / "completions.jsonl"
    while process.returncode is None and not (completions.exists() and completions.stat().st_size):
        await asyncio.sleep(0.02)


def read(path: Path, complaints: list[str]) -> list[dict[str, object]]:
    """Return the lines of a file of JSON lines; complain of lines that are not whole."""
    if not path.exists():
        return []
    text = path.read_bytes()
    if text and not text.endswith(b"\n"):
        complaints.append(f"{os.path.basename(path)} ends in half a line")
    found = []
    for line in text.splitlines(keepends=True):
        if line.endswith(b"\n"):
            try:
                found.append(msgspec.json.decode(line))
            except msgspec.DecodeError as error:
                complaints.append(f"{os.path.basename(path)}: {error}")
    return found
