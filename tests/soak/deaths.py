"""Deaths of `seer run`: the same command with --resume until it is done, and what it must have written then.

Each life gets one death or two at random moments: a signal, a disk that is full, an engine's process that is
killed, and between two lives a journal that is torn or has flipped bits.
"""

from __future__ import annotations

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import attrs
import psutil

from .fault_kinds import children

__all__ = ["KINDS", "Campaign", "responses_in", "run_campaign"]

Response = tuple[list[int], list[float], str]

SIGNALS = {
    "SIGKILL": signal.SIGKILL,
    "SIGTERM": signal.SIGTERM,
    "SIGINT": signal.SIGINT,
    "SIGHUP": signal.SIGHUP,
}
STATUSES = {"SIGKILL": -9, "SIGTERM": 143, "SIGINT": 130, "SIGHUP": 129, "stopped": -9, "full disk": 2}
DAMAGES = ("torn journal", "flipped bits")
STATUSES |= dict.fromkeys(DAMAGES, -9)
KINDS = (*SIGNALS, "stopped", "full disk", "engine", *DAMAGES)
GONE_WITHIN_S = 60.0
LIFE_S = 600.0
STOPPED_S = 0.5


@attrs.define
class Campaign:
    """Runs one command again and again; ``life_bytes`` of journal is about what a life may write.

    ``deaths`` counts them by kind, ``complaints`` are what went wrong.
    """

    arguments: Sequence[str]
    out: Path
    chance: random.Random
    kinds: Sequence[str] = KINDS
    life_bytes: int = 20_000
    deaths: Counter[str] = attrs.Factory(Counter)
    complaints: list[str] = attrs.Factory(list)
    lives: int = 0

    def finish(self) -> dict[str, Response]:
        """Let the run die until it is done, and return its responses by request."""
        while not self._live():
            assert not self.complaints, self.complaints
        found = responses_in(self.out)
        if (self.out / "journal").exists():
            self.complaints.append("a finished run has a journal")
        return found

    def _live(self) -> bool:
        """Live once, and return whether the run has finished."""
        self.lives += 1
        kinds = self.chance.choices(self.kinds, k=self.chance.choice((1, 1, 2)))
        process = subprocess.Popen(
            [sys.executable, "-c", "from seer_main import main; main()", *self.arguments, "--resume"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
        )
        started = self._die_of(process, kinds)
        try:
            _, errors = process.communicate(timeout=LIFE_S)
        except subprocess.TimeoutExpired:
            self.complaints.append(f"still there after {LIFE_S:g} s")
            process.kill()
            _, errors = process.communicate()
        allowed = {0, *(STATUSES[kind] for kind in kinds if kind in STATUSES)}
        if process.returncode not in allowed or "Traceback" in errors:
            self.complaints.append(f"{kinds}: ended with {process.returncode}: {errors[-1500:]}")
        _, alive = psutil.wait_procs(started, GONE_WITHIN_S)
        if alive := [each for each in alive if each.status() != psutil.STATUS_ZOMBIE]:
            self.complaints.append(f"{kinds}: left {len(alive)} processes")
        if process.returncode != 0:
            self._damage(kinds)
        return process.returncode == 0

    def _die_of(self, process: subprocess.Popen[str], kinds: Sequence[str]) -> list[psutil.Process]:
        """Wait until a random part of the run is written, and do it; return the processes that it had."""
        wanted = self._written() + self.chance.randrange(self.life_bytes)
        early_s = time.monotonic() + self.chance.uniform(0, 3) if self.chance.random() < 0.1 else None
        while process.poll() is None and self._written() < wanted:
            time.sleep(0.01)
            if early_s is not None and time.monotonic() > early_s:
                break
        if process.poll() is not None:
            return []
        started = children(process.pid)
        for kind in kinds:
            with suppress(ProcessLookupError, psutil.NoSuchProcess):
                self._inflict(kind, process, started)
            self.deaths[kind] += 1
        return started

    def _inflict(self, kind: str, process: subprocess.Popen[str], started: Sequence[psutil.Process]) -> None:
        if kind in SIGNALS:
            process.send_signal(SIGNALS[kind])
        elif kind in DAMAGES:
            process.send_signal(signal.SIGKILL)
        elif kind == "stopped":
            process.send_signal(signal.SIGSTOP)
            time.sleep(STOPPED_S)
            process.send_signal(signal.SIGKILL)
        elif kind == "full disk":
            size = self.chance.randint(1, 3 * self.life_bytes)
            resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        elif kind == "engine" and started:
            self.chance.choice(started).kill()

    def _damage(self, kinds: Sequence[str]) -> None:
        files = sorted((self.out / "journal").glob("*.journal"))
        if not files:
            return
        if "torn journal" in kinds:
            os.truncate(files[-1], self.chance.randint(0, files[-1].stat().st_size))
        if "flipped bits" in kinds:
            path = self.chance.choice(files)
            data = bytearray(path.read_bytes())
            for _ in range(self.chance.randint(1, 20) if data else 0):
                data[self.chance.randrange(len(data))] ^= 1 << self.chance.randrange(8)
            path.write_bytes(data)

    def _written(self) -> int:
        return sum(_size(path) for path in (self.out / "journal").glob("*.journal"))


def responses_in(out: Path) -> dict[str, Response]:
    """Return tokens, log-probs and finish reason of each response that a run has written."""
    found: dict[str, Response] = {}
    for line in (out / "completions.jsonl").read_bytes().splitlines():
        response = json.loads(line)
        assert response["request_id"] not in found
        found[response["request_id"]] = response["token_ids"], response["logprobs"], response["finish_reason"]
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except OSError:
        return 0


def run_campaign(
    make: Callable[[Path], Campaign], folder: Path, minutes: float, least: int
) -> tuple[Counter[str], int, list[dict[str, Response]]]:
    """Finish runs until the time is over; return the deaths by kind, the lives, and all responses found."""
    deaths: Counter[str] = Counter()
    lives, found = 0, []
    end = time.monotonic() + 60 * minutes
    while time.monotonic() < end or deaths.total() < least:
        campaign = make(folder / f"run-{len(found)}")
        found.append(campaign.finish())
        assert not campaign.complaints, campaign.complaints
        deaths += campaign.deaths
        lives += campaign.lives
    return deaths, lives, found
