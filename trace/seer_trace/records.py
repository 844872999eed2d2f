"""The trace: every event with its time and commands, one JSON line each, and its replay."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import msgspec
from seer_host.json_files import JsonFormat
from seer_host.line_files import LineFile

from seer_core.errors import InputError, OutputError, SeerError
from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import Scheduler

__all__ = ["TraceRecord", "TraceWriter", "read_trace", "replay"]


class TraceRecord(msgspec.Struct, frozen=True):
    """One event, and the scheduler's answer to it."""

    now: float
    """When it happened, in seconds on the run's clock."""
    event: Event
    """The event; its ``type`` names the kind."""
    commands: list[Command]
    """The commands with which the scheduler answered; the ``type`` of each names the kind."""


_RECORDS = JsonFormat[TraceRecord](
    TraceRecord, "not a trace record", "name the trace of a `seer run` that ended by itself", InputError
)


class TraceWriter(Observer):
    """Observer that writes a trace to a file, as it happens.

    A runtime shows it events until it has stopped, or uses other observers: close it afterwards.
    """

    def __init__(self, path: str | os.PathLike[str], *, hidden: bool = False) -> None:
        self.file = LineFile(path, hidden=hidden)
        self._encoder = msgspec.json.Encoder()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Write one line.

        Raises:
            OutputError: it cannot be written, or is closed.
        """
        if self.file.closed:
            raise OutputError(
                f"the trace {self.file.path} is closed, and is still shown events; close it when the runtime"
                " has stopped or uses other observers"
            )
        try:
            self.file.write(self._encoder.encode(TraceRecord(now, event, list(commands))))
        except OSError as error:
            raise OutputError(
                f"cannot write the trace {self.file.path}: {error.strerror}; free some space, then run again"
            ) from error

    def close(self) -> None:
        """Close the file."""
        self.file.close()


def read_trace(path: str | os.PathLike[str]) -> Iterator[TraceRecord]:
    """Yield a trace's records in order.

    Raises:
        InputError: it cannot be read, or a line is not a record.
    """
    for _, record in _RECORDS.lines(path):
        yield record


def replay(path: str | os.PathLike[str], scheduler: Scheduler) -> int:
    """Feed a trace's events to a fresh scheduler and return how many led to the same commands.

    Raises:
        SeerError: the scheduler decided otherwise; the message shows the first difference.
    """
    count = 0
    for record in read_trace(path):
        commands = scheduler.handle(record.event, record.now)
        if commands != record.commands:
            raise SeerError(
                f"replay differs at record {count + 1}, {type(record.event).__name__} at"
                f" {record.now:.6f} s: recorded {record.commands}, now {commands}"
            )
        count += 1
    return count
