"""Deaths: the ways in which a command's process, its children, its disk or its files are struck.

A cgroup's kill and a read-only disk need root, and are left out where they cannot be had.
"""

from __future__ import annotations

import os
import random
import resource
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import psutil

__all__ = ["DAMAGES", "DEATHS", "Disk", "Life", "bad_ending", "damage", "strike"]

CGROUPS = Path("/sys/fs/cgroup/memory")
DISK_BYTES = 256 << 20
PAUSE_S = (0.2, 3.0)
STARVED_S = 1.0
LONGEST_JUMP_S = 3 * 86_400


class Disk:
    """A file system of its own at ``path``, if this process may mount one; else a directory."""

    def __init__(self, path: Path) -> None:
        path.mkdir()
        self.path = path
        self.mounted = _mount("-t", "tmpfs", "-o", f"size={DISK_BYTES}", "none", path)

    def set_writable(self, writable: bool) -> None:
        """Make it writable, or read-only."""
        if self.mounted:
            _mount("-o", f"remount,{'rw' if writable else 'ro'}", self.path)

    def close(self) -> None:
        """Unmount it."""
        if self.mounted:
            subprocess.run(["umount", "--lazy", str(self.path)], check=True)


def _mount(*arguments: str | Path) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


@attrs.frozen
class Life:
    """A process with its ``children``; its clock is off by what ``clock`` has, ``scratch`` is its TMPDIR."""

    process: subprocess.Popen[str]
    children: Sequence[psutil.Process]
    chance: random.Random
    disk: Disk
    life_bytes: int
    clock: Path
    scratch: Path

    def pause(self) -> None:
        """Stop the process for a while."""
        self.process.send_signal(signal.SIGSTOP)
        time.sleep(self.chance.uniform(*PAUSE_S))

    def starve(self) -> None:
        """Let the kernel end what next takes memory, the process or a child: in a cgroup without any."""
        group = CGROUPS / f"seer-{self.process.pid}"
        group.mkdir()
        try:
            for pid in (self.process.pid, *(child.pid for child in self.children)):
                with suppress(OSError):
                    (group / "cgroup.procs").write_text(str(pid))
            (group / "memory.limit_in_bytes").write_text(str(1 << 20))
            time.sleep(STARVED_S)
        finally:
            with suppress(OSError):
                (group / "memory.limit_in_bytes").write_text("-1")
            for pid in (group / "cgroup.procs").read_text().split():
                with suppress(OSError):
                    (CGROUPS / "cgroup.procs").write_text(pid)
            with suppress(OSError):
                group.rmdir()


def _signal(number: signal.Signals) -> Callable[[Life], None]:
    return lambda life: life.process.send_signal(number)


def _resume(life: Life) -> None:
    life.pause()
    life.process.send_signal(signal.SIGCONT)


def _stop(life: Life) -> None:
    life.pause()
    life.process.kill()


def _limit_files(life: Life) -> None:
    size = life.chance.randint(1, 3 * life.life_bytes)
    resource.prlimit(life.process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))


def _kill_child(life: Life) -> None:
    if life.children:
        life.chance.choice(life.children).kill()


def _jump(life: Life) -> None:
    life.clock.write_text(str(life.chance.uniform(-LONGEST_JUMP_S, LONGEST_JUMP_S)))


def _empty_scratch(life: Life) -> None:
    for each in life.scratch.iterdir():
        shutil.rmtree(each, ignore_errors=True)


@attrs.frozen
class Death:
    """A way to strike, and the exit statuses that it explains, beside 0."""

    strike: Callable[[Life], None]
    statuses: frozenset[int]


_MOUNTS = os.geteuid() == 0 and shutil.which("mount") is not None
_STARVES = os.geteuid() == 0 and (CGROUPS / "memory.limit_in_bytes").exists()

DEATHS = {
    "SIGKILL": Death(_signal(signal.SIGKILL), frozenset({-9})),
    "SIGTERM": Death(_signal(signal.SIGTERM), frozenset({143})),
    "SIGINT": Death(_signal(signal.SIGINT), frozenset({130})),
    "SIGHUP": Death(_signal(signal.SIGHUP), frozenset({129})),
    "stopped": Death(_stop, frozenset({-9})),
    "paused": Death(_resume, frozenset()),
    "full disk": Death(_limit_files, frozenset({1, 2})),
    "child": Death(_kill_child, frozenset({1})),
    "clock": Death(_jump, frozenset()),
    "scratch": Death(_empty_scratch, frozenset({1, 2})),
    **(
        {"read-only disk": Death(lambda life: life.disk.set_writable(False), frozenset({1, 2}))}
        if _MOUNTS
        else {}
    ),
    **({"out of memory": Death(Life.starve, frozenset({-9, 1}))} if _STARVES else {}),
}
"""By name.  Of those that end no process a life goes on."""

DAMAGES = ("torn journal", "flipped bits")
"""Done to the journal of a process that has died."""


def strike(kind: str, life: Life) -> None:
    """Strike a life, which may have ended already; a process is killed before its journal is damaged."""
    with suppress(ProcessLookupError, psutil.NoSuchProcess):
        if kind in DAMAGES:
            life.process.kill()
        else:
            DEATHS[kind].strike(life)


def bad_ending(
    process: subprocess.Popen[str], kinds: Sequence[str], limit_s: float, errors: Path, allowed: set[int]
) -> list[str]:
    """Wait for the end of a process; complain if it does not come, or is not explained by ``kinds``.

    ``errors`` has what the process wrote to standard error; it may end with the ``allowed`` statuses too.
    """
    complaints = []
    try:
        process.wait(limit_s)
    except subprocess.TimeoutExpired:
        complaints.append(f"{kinds}: still there after {limit_s:g} s")
        process.kill()
        process.wait()
    explained = allowed.union(*(DEATHS[kind].statuses for kind in kinds if kind in DEATHS))
    text = errors.read_text()
    if process.returncode not in explained or "Traceback" in text:
        complaints.append(f"{kinds}: ended with {process.returncode}: {text[-3000:]}")
    return complaints


def damage(kind: str, journal: Path, chance: random.Random) -> None:
    """Tear the last file of a journal, or flip some bits of one."""
    files = sorted(journal.rglob("*.journal"))
    if not files:
        return
    if kind == "torn journal":
        os.truncate(files[-1], chance.randint(0, files[-1].stat().st_size))
        return
    path = chance.choice(files)
    data = bytearray(path.read_bytes())
    for _ in range(chance.randint(1, 20) if data else 0):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    path.write_bytes(data)
