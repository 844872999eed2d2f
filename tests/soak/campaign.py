"""A campaign: one command dies again and again, and goes on with --resume until it is done."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Generic, TypeVar

import attrs
import psutil

from .deaths import DAMAGES, DEATHS, Disk, Life, bad_ending, damage, strike
from .fault_kinds import children

__all__ = ["KINDS", "Campaign", "run_campaign"]

T = TypeVar("T")

KINDS = (*DEATHS, *DAMAGES)
GONE_WITHIN_S = 60.0
BEGINS_S = 0.1
LIFE_S = 600.0
SHARED_MEMORY = Path("/dev/shm")
PROGRAM = """
import sys, time
from pathlib import Path
real, folder = time.time, Path(sys.argv.pop(1))
time.time = lambda: real() + float((folder / "clock").read_text() or 0)
from seer_main import main
(folder / "begun").touch()
main()
"""
"""A command whose clock is off, and which makes a file once it is about to handle signals."""


@attrs.define
class Campaign(Generic[T]):
    """Runs ``arguments`` until they are done; ``result`` reads what is in their --out then.

    A life is struck once its journal has grown by up to ``life_bytes``, or after up to ``life_s`` seconds.
    ``deaths`` counts the strikes by kind; ``complaints`` are what went wrong.
    """

    arguments: Sequence[str]
    folder: Path
    chance: random.Random
    result: Callable[[Path], T]
    kinds: Sequence[str] = KINDS
    life_bytes: int = 20_000
    life_s: float = LIFE_S
    deaths: Counter[str] = attrs.Factory(Counter)
    complaints: list[str] = attrs.Factory(list)
    lives: int = 0

    def finish(self) -> T:
        """Let it die until it is done, and return the result."""
        self.folder.mkdir()
        (self.folder / "clock").write_text("0")
        (self.folder / "scratch").mkdir()
        before = set(SHARED_MEMORY.iterdir())
        disk = Disk(self.folder / "disk")
        try:
            while not self._live(disk):
                assert not self.complaints, self.complaints
            result = self.result(disk.path / "out")
            if list((disk.path / "out").rglob("*.journal")):
                self.complaints.append("a finished command has a journal")
        finally:
            disk.close()
        if left := [path.name for path in set(SHARED_MEMORY.iterdir()) - before if "seer" in path.name]:
            self.complaints.append(f"shared memory is left: {left}")
        return result

    def _live(self, disk: Disk) -> bool:
        """Live once, and return whether it is done."""
        self.lives += 1
        kinds = self.chance.choices(self.kinds, k=self.chance.choice((1, 1, 2)))
        out = disk.path / "out"
        command = [sys.executable, "-c", PROGRAM, str(self.folder), *self.arguments]
        (self.folder / "begun").unlink(missing_ok=True)
        with (self.folder / "errors").open("w") as stderr:
            process = subprocess.Popen(
                [*command, "--out", str(out), "--resume"],
                env={**os.environ, "TMPDIR": str(self.folder / "scratch")},
                stdout=subprocess.DEVNULL,
                stderr=stderr,
                text=True,
            )
        started = self._strike(process, kinds, disk)
        allowed = {0, -9} if set(kinds).intersection(DAMAGES) else {0}
        self.complaints += bad_ending(process, kinds, LIFE_S, self.folder / "errors", allowed)
        disk.set_writable(True)
        _, alive = psutil.wait_procs(started, GONE_WITHIN_S)
        if alive := [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]:
            self.complaints.append(f"{kinds}: left {len(alive)} processes")
        if process.returncode != 0:
            for kind in set(kinds).intersection(DAMAGES):
                damage(kind, out / "journal", self.chance)
        return process.returncode == 0

    def _strike(
        self, process: subprocess.Popen[str], kinds: Sequence[str], disk: Disk
    ) -> list[psutil.Process]:
        """Wait until a random part of the journal is written, and strike; return the children of then."""
        while process.poll() is None and not (self.folder / "begun").exists():
            time.sleep(0.01)
        time.sleep(BEGINS_S)
        journal = disk.path / "out" / "journal"
        wanted = _size(journal) + self.chance.randrange(self.life_bytes)
        early = self.chance.random() < 0.1
        end = time.monotonic() + self.chance.uniform(0, min(3, self.life_s) if early else self.life_s)
        while process.poll() is None and _size(journal) < wanted and time.monotonic() < end:
            time.sleep(0.01)
        if process.poll() is not None:
            return []
        started = children(process.pid)
        life = Life(
            process,
            started,
            self.chance,
            disk,
            self.life_bytes,
            self.folder / "clock",
            self.folder / "scratch",
        )
        for kind in kinds:
            strike(kind, life)
            self.deaths[kind] += 1
        return started


def _size(journal: Path) -> int:
    found = 0
    for path in journal.rglob("*.journal"):
        with suppress(OSError):  # just removed
            found += path.stat().st_size
    return found


def run_campaign(
    make: Callable[[Path], Campaign[T]], folder: Path, minutes: float, least: int
) -> tuple[Counter[str], int, list[T]]:
    """Finish commands until the time is over; return the deaths by kind, the lives, and all results."""
    deaths: Counter[str] = Counter()
    lives, found = 0, []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end or deaths.total() < least:
        campaign = make(folder / f"campaign-{len(found)}")
        found.append(campaign.finish())
        assert not campaign.complaints, campaign.complaints
        deaths += campaign.deaths
        lives += campaign.lives
    return deaths, lives, found
