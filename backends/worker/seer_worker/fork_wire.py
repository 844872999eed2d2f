"""The messages between a runtime and a fork server, over a socket of each forked worker's own.

The runtime sends ``Fork`` once; the server answers ``Forked`` and later ``Exited``, or one of the others.  It
keeps the worker's process id from being given to another process until the runtime shuts its end of the
socket: then it kills what still runs of the worker's group, reaps the worker and closes the socket.
"""

from __future__ import annotations

from msgspec import Struct

__all__ = ["Exited", "Fork", "ForkFailed", "Forked", "FromServer", "ToServer", "Unfit"]


class Fork(Struct, tag=True, frozen=True):
    """Fork a worker, as a child process of the runtime would be started.

    The descriptors that come with it are the socket itself, the worker's connection to the runtime, the end
    of a pipe that ``lead_group`` takes, the log, and the working directory.
    """

    name: str
    """The instance's id."""
    environment: dict[str, str]
    """All variables of the worker."""
    umask: int
    limits: dict[int, tuple[int, int]]
    """The soft and the hard limit of each of the runtime's resources, by its number in ``resource``."""
    cpus: list[int]
    """The processors on which the runtime may run."""


class Forked(Struct, tag=True, frozen=True):
    """The worker runs."""

    pid: int
    """Its process id, which is also that of its group."""


class Unfit(Struct, tag=True, frozen=True):
    """A worker that is forked here would not be as one that is started anew."""

    reason: str
    for_path: bool = False
    """Whether a server that is started with the worker's PYTHONPATH would do."""


class ForkFailed(Struct, tag=True, frozen=True):
    """The machine lacks what a process takes."""

    errno: int


class Exited(Struct, tag=True, frozen=True):
    """The worker has ended."""

    status: int
    """The exit status, negative for a signal."""


ToServer = Fork
FromServer = Forked | Unfit | ForkFailed | Exited
