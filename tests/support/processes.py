"""Processes by their ids, as Linux shows them."""

from __future__ import annotations

import os
from collections import defaultdict
from pathlib import Path

__all__ = ["alive", "children_of", "command_of", "descendants", "describe", "stopped"]


def alive(pid: int) -> bool:
    """Return whether a process runs; one that has ended and was not waited for does not."""
    return _state_and_parent(pid)[0] not in ("gone", "Z", "X")


def stopped(pid: int) -> bool:
    """Return whether all threads of a process have been stopped, which a signal does a moment later."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return all((each / "stat").read_text().rpartition(")")[2].split()[0] == "T" for each in threads)


def children_of(pid: int) -> list[int]:
    """Return the children of a process that it has not waited for."""
    return _children().get(pid, [])


def descendants(pid: int | None = None) -> list[int]:
    """Return the children of a process, by default of this one, and theirs, each after its parent."""
    children = _children()
    found, left = [], [os.getpid() if pid is None else pid]
    while left:
        below = children.get(left.pop(0), [])
        found += below
        left += below
    return found


def command_of(pid: int) -> str:
    """Return the command line of a process, empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
    except OSError:
        return ""


def describe(pid: int) -> str:
    """Return a line about a process: its id, its parent's, its state and its command."""
    state, parent = _state_and_parent(pid)
    return f"{pid} of {parent}, {state}: {command_of(pid):.300}"


def _children() -> dict[int, list[int]]:
    children = defaultdict(list)
    for pid in sorted(int(each) for each in os.listdir("/proc") if each.isdigit()):
        children[_state_and_parent(pid)[1]].append(pid)
    return children


def _state_and_parent(pid: int) -> tuple[str, int]:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return "gone", 0
    return fields[0], int(fields[1])
