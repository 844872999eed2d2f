"""Responses of earlier rollouts, by prompt: in memory, or in a file that outlives the process."""

from __future__ import annotations

import sqlite3
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import structlog

from seer_core.errors import ConfigError
from seer_core.model.arrays import Tokens

__all__ = ["EarlierResponses"]

log = structlog.get_logger("seer")

SCHEMA = """
create table if not exists responses (number integer primary key, prompt blob not null, tokens blob not null);
create index if not exists by_prompt on responses (prompt, number);
"""


class EarlierResponses:
    """A ``ResponseMemory``: the newest ``per_prompt`` responses to each prompt, in at most ``max_bytes``.

    Beyond that the oldest of all are dropped first.  A ``file`` is SQLite's, and has one process at a time;
    it is never synced, so a power failure may cost it.  If it fails, no response is recalled or taken in any
    more: drafts are then those without a memory.

    Raises:
        ConfigError: the file is damaged, or another process has it.
    """

    def __init__(self, per_prompt: int, max_bytes: int, file: Path | None = None) -> None:
        self._per_prompt, self._max_bytes = per_prompt, max_bytes
        self._failed = False
        try:
            self._database = _opened(file)
            ((self._bytes, newest),) = self._database.execute(
                "select coalesce(sum(length(tokens)), 0), coalesce(max(number), 0) from responses"
            )
        except sqlite3.Error as error:
            raise ConfigError(
                f"plugin.grouped_spec.earlier_file: {file}: {error}; name a file that no other process"
                " uses, or remove this one"
            ) from error
        self._next = newest + 1
        self._first = 0

    def recall(self, prompt: Sequence[int]) -> list[Tokens]:
        """Return what was taken in for a prompt, the oldest first."""
        if self._failed:
            return []
        try:
            rows = self._database.execute(
                "select tokens from responses where prompt = ? and number >= ? order by number",
                (_key(prompt), self._first),
            )
            return [Tokens(blob) for (blob,) in rows]
        except sqlite3.Error as error:
            self._fail(error)
            return []

    def remember(self, prompt: Sequence[int], response: Tokens) -> None:
        """Take a response in, and drop others for it."""
        if self._failed:
            return
        key, blob = _key(prompt), response.tobytes()
        try:
            self._database.execute("insert into responses values (?, ?, ?)", (self._next, key, blob))
            self._next += 1
            self._bytes += len(blob)
            self._drop(
                "prompt = ? and number <= (select number from responses where prompt = ?"
                " order by number desc limit 1 offset ?)",
                (key, key, self._per_prompt),
            )
            while self._bytes > self._max_bytes:
                self._drop("number = (select min(number) from responses)")
        except sqlite3.Error as error:
            self._fail(error)

    def clear(self) -> None:
        """Recall nothing of before; a file keeps it for the next process."""
        self._first = self._next

    def close(self) -> None:
        """Let go of the file."""
        self._database.close()

    def _drop(self, which: str, values: tuple[object, ...] = ()) -> None:
        dropped = self._database.execute(
            f"delete from responses where {which} returning length(tokens)", values
        ).fetchall()
        self._bytes -= sum(size for (size,) in dropped)

    def _fail(self, error: sqlite3.Error) -> None:
        self._failed = True
        log.warning(
            "earlier_responses_failed", error=str(error), consequence="drafts come from siblings alone"
        )


def _opened(file: Path | None) -> sqlite3.Connection:
    # The loop's thread may be another one than that which has read the config.
    database = sqlite3.connect(file or ":memory:", timeout=0.0, isolation_level=None, check_same_thread=False)
    try:
        for pragma in ("locking_mode = exclusive", "journal_mode = wal", "synchronous = off"):
            database.execute(f"pragma {pragma}")
        database.executescript(SCHEMA)
    except BaseException:
        database.close()
        raise
    return database


def _key(prompt: Sequence[int]) -> bytes:
    return blake2b(Tokens(prompt).tobytes(), digest_size=16).digest()
