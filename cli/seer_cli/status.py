"""The status of a run: a small file that it writes as it goes, and ``seer status``, which reads it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Literal

import click
import msgspec
from seer_host.json_files import JsonFormat
from seer_host.line_files import claim

from seer_cli.common import main_options
from seer_cli.output import RUN_FILES, InputPath, check_writable, write_json
from seer_core.errors import InputError, OutputError, SeerError, printable

__all__ = ["STATUS", "Status", "StatusFile", "status_command"]

STATUS = "status.json"
"""Its name in a run's directory."""

COMPLETIONS, _, SUMMARY = RUN_FILES
METRICS = "metrics.jsonl"
"""Of a training: a line for each iteration."""

STARTING = "starting"
COUNT = re.compile(r"\d+ of (\d+) responses")
"""How the progress of a rollout begins."""

BEAT_S = 1.0
SILENT_S = 30.0
"""A run that promises a sign of life every second, and gave none for so long, hangs."""


class Status(msgspec.Struct):
    """The present work of a process; times are seconds since 1970."""

    pid: int
    """The process id."""
    doing: str
    """The present work, in words."""
    since: float
    """When this work began."""
    at: float
    """When this file was written."""
    progress: str = ""
    """How far the work is, in words."""
    beats: bool = False
    """Whether the process writes this file every second."""
    ended: Literal["", "interrupted", "failed"] = ""
    """How a training has ended that could not end as wanted; empty while it goes on."""
    error: str = ""
    """The error of one that failed."""


class _Summary(msgspec.Struct):
    """The part of a run's summary that says how it ended."""

    ended: Literal["finished", "interrupted", "failed"]
    requested: int
    error: str | None = None


_STATUS = JsonFormat[Status](Status, "no status of a run", "name the --out of a run", InputError)
_SUMMARY = JsonFormat[_Summary](_Summary, "no summary of a run", "name the --out of a run", InputError)


class StatusFile:
    """Writes ``status.json`` into a directory; a disk that takes nothing costs the file and no more."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / STATUS
        self._lock = threading.Lock()
        self._removed = False
        self._status = Status(os.getpid(), STARTING, time.time(), time.time())

    def enter(self, doing: str) -> None:
        """Write down that something else begins."""
        self._status.doing, self._status.since, self._status.progress = doing, time.time(), ""
        self.write()

    def progress(self, text: str) -> None:
        """Write down how far it is, once in a second at most."""
        self._status.progress = text
        if time.time() >= self._status.at + BEAT_S:
            self.write()

    def write(self) -> None:
        """Write the file, unless the run has ended."""
        with self._lock, contextlib.suppress(SeerError):
            if not self._removed:
                self._status.at = time.time()
                write_json(self._path, self._status)

    @contextlib.asynccontextmanager
    async def beating(self, progress: Callable[[], str]) -> AsyncIterator[None]:
        """Write it every second meanwhile, as long as the event loop turns."""

        async def beat() -> None:
            while True:
                self._status.progress = progress()
                await asyncio.to_thread(self.write)
                await asyncio.sleep(BEAT_S)

        self._status.beats = True
        beats = asyncio.create_task(beat())
        try:
            yield
        finally:
            beats.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await beats
            self._status.beats = False

    def end(self, ended: Literal["interrupted", "failed"], error: str = "") -> None:
        """Keep the file as the one that says how the run ended, where no summary does."""
        self._status.ended, self._status.error = ended, error
        self.write()
        self._removed = True

    def remove(self) -> None:
        """Delete the file: the run ends in order, and its results say how."""
        with self._lock, contextlib.suppress(OSError):
            self._removed = True
            self._path.unlink(missing_ok=True)


@click.command("status")
@main_options
@click.argument("directory", type=InputPath())
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write what was found here too.")
def status_command(directory: Path, json_file: Path | None) -> None:
    """Report what the run that writes into DIRECTORY, of `seer run` or `seer train`, is doing and since when.

    If none is under way, report how the last one ended. Responses and iterations are counted in its files.

    Exit status 0: it runs, has finished, or was interrupted in order.  1: it failed, its process died or
    gives no sign of life, or its files are not those that its summary describes.

    \b
    Example:
      seer status out/first
    """
    check_writable(json_file)
    found = _find(directory)
    if json_file is not None:
        write_json(json_file, found)
    click.echo(found["summary"])
    sys.exit(0 if found["state"] in ("running", "ended") else 1)


def _find(directory: Path) -> dict[str, Any]:
    """Return the state of a run, its status or how it ended, and a sentence of both.

    Raises:
        InputError: there is no run in the directory, or a file of it cannot be read.
    """
    where = printable(str(directory))
    running = _claimed(directory)
    if not (directory / STATUS).exists():
        if running:
            return {"state": "running", "summary": f"{where}: a run is starting"}
        return _ending(directory, where)
    status = _STATUS.read(directory / STATUS)
    if not running and status.doing != STARTING and (directory / SUMMARY).exists():
        return _ending(directory, where)  # its process was killed after it had ended
    status.progress = _counted(directory, status.progress)
    if not running and status.ended:
        return {**_ending_of_training(directory, where, status), **msgspec.to_builtins(status)}
    silent_s = max(0.0, time.time() - status.at)
    state = "running" if running else "died"
    if running and status.beats and silent_s > SILENT_S:
        state = "hangs"
    doing = f"{printable(status.doing)} for {_duration(time.time() - status.since)}"
    progress = f", {printable(status.progress)}" if status.progress else ""
    sentences = {
        "running": f"{where}: {doing}{progress}; process {status.pid}, last sign of life"
        f" {_duration(silent_s)} ago",
        "hangs": f"{where}: {doing}{progress}, and no sign of life for {_duration(silent_s)}; end process"
        f" {status.pid} and go on with --resume",
        "died": f"{where}: process {status.pid} died {_duration(silent_s)} ago at the latest, while it was"
        f" {printable(status.doing)}{progress}; go on with the same command and --resume",
    }
    return {"state": state, "silent_s": silent_s, "summary": sentences[state], **msgspec.to_builtins(status)}


def _ending(directory: Path, where: str) -> dict[str, Any]:
    """Return how the last run in a directory ended, by its summary, or a training by its metrics."""
    if not (directory / SUMMARY).exists():
        if (directory / METRICS).exists():
            status = Status(0, "", 0, 0)
            return _ending_of_training(directory, where, status)
        if not any((directory / name).exists() for name in (*RUN_FILES, "journal")):
            raise InputError(f"{where} holds no run; name the --out of `seer run` or `seer train`")
        return {
            "state": "failed",
            "summary": f"{where}: no run is under way; the last one failed before it could write its summary;"
            " go on with the same command and --resume",
        }
    last = _SUMMARY.read(directory / SUMMARY)
    responses = _lines_of(directory / COMPLETIONS)
    found = {"ended": last.ended, "responses": responses, "requested": last.requested, "error": last.error}
    count = f"{responses} of {last.requested} responses"
    if last.ended == "failed":
        state = "failed"
        how = f"the last one failed with {count}: {printable(last.error or 'no reason was given')}"
    elif last.ended == "finished" and responses != last.requested:
        state = "damaged"
        how = f"the last one ended in order, and of its responses {COMPLETIONS} has {count}"
    else:
        state, how = "ended", f"the last one ended in order, {last.ended} with {count}"
    remedy = "" if last.ended == "finished" else "; go on with the same command and --resume"
    return {"state": state, "summary": f"{where}: no run is under way; {how}{remedy}", **found}


def _ending_of_training(directory: Path, where: str, status: Status) -> dict[str, Any]:
    """Return how the last training in a directory ended."""
    iterations = _lines_of(directory / METRICS)
    count = f"{iterations} iteration{'' if iterations == 1 else 's'}"
    how = {
        "": f"ended in order, finished with {count}",
        "interrupted": f"ended in order, interrupted with {count}; go on with the same command and --resume",
        "failed": f"failed with {count}: {printable(status.error)}",
    }[status.ended]
    return {
        "state": "failed" if status.ended == "failed" else "ended",
        "summary": f"{where}: no run is under way; the last one {how}",
        "iterations": iterations,
    }


def _counted(directory: Path, progress: str) -> str:
    """Return the progress of a rollout with the number of responses that are in its file."""
    if not (directory / COMPLETIONS).exists():
        return progress
    return COUNT.sub(
        lambda found: f"{_lines_of(directory / COMPLETIONS)} of {found[1]} responses", progress, 1
    )


def _lines_of(path: Path) -> int:
    """Return how many whole lines a file has, 0 if it is not there."""
    try:
        with path.open("rb") as file:
            return sum(line.endswith(b"\n") for line in file)
    except FileNotFoundError:
        return 0
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; name the --out of a run") from error


def _claimed(directory: Path) -> bool:
    """Return whether a process writes into a directory."""
    try:
        with claim(directory, ""):
            return False
    except OutputError:
        return True
    except OSError as error:
        raise InputError(f"cannot read {directory}: {error.strerror}; name the --out of a run") from error


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes, rest = divmod(int(seconds), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"
