"""KV in a database of SQLite, for a start."""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from msgspec import Meta, Struct
from numpy.typing import NDArray
from seer_core.plugins.hookspecs import hookimpl
from seer_core.ports.kv import KVPool, PoolStats, StoreContext, StoreSpec

TABLES = """
CREATE TABLE blocks (key BLOB PRIMARY KEY, used INTEGER, data BLOB);
CREATE INDEX oldest ON blocks (used);
CREATE TABLE counts (name TEXT PRIMARY KEY, value INTEGER);
"""


class Settings(Struct, frozen=True):
    """Keys of ``[kv_pool.sqlite_kv]``; all instances share the capacity."""

    capacity_bytes: Annotated[int, Meta(ge=1)] = 2**30


def connect(path: str) -> sqlite3.Connection:
    """Open the database; every transaction is begun by ``changing``."""
    return sqlite3.connect(path, isolation_level=None, check_same_thread=False)


@contextmanager
def changing(database: sqlite3.Connection) -> Iterator[None]:
    """Run the block as one transaction, with the database locked against other writers."""
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
    except BaseException:
        database.execute("ROLLBACK")
        raise
    database.execute("COMMIT")


class SqliteStore:
    """KVStore, the engine half, made in each engine's process; all of them use one database.

    What SQLite cannot do raises, and the instance goes on without the pool.
    """

    def __init__(self, settings: Mapping[str, Any], host: StoreContext) -> None:
        self._most_blocks = settings["capacity_bytes"] // host.block_bytes
        self._database = connect(settings["path"])

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, are there."""
        with changing(self._database):
            found = next((n for n, key in enumerate(keys) if not self._has(key)), len(keys))
            self._count(asked_blocks=len(keys), hit_blocks=found)
        return found

    def lacks(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of those keys that are not there; the others count as used just now."""
        with changing(self._database):
            missing = [n for n, key in enumerate(keys) if not self._has(key)]
            now = self._now()
            self._database.executemany(
                "UPDATE blocks SET used = ? WHERE key = ?", [(now, key) for key in keys]
            )
        return missing

    def put(self, keys: Sequence[bytes], blocks: NDArray[np.uint8]) -> None:
        """Keep copies, and lose those used longest ago for want of room."""
        with changing(self._database):
            now = self._now()
            rows = [(key, now, block.tobytes()) for key, block in zip(keys, blocks, strict=True)]
            self._database.executemany("INSERT OR REPLACE INTO blocks VALUES (?, ?, ?)", rows)
            over = max(0, self._one("SELECT COUNT(*) FROM blocks") - self._most_blocks)
            self._database.execute(
                "DELETE FROM blocks WHERE key IN (SELECT key FROM blocks ORDER BY used LIMIT ?)", (over,)
            )
            self._count(put_bytes=blocks.nbytes, evicted_blocks=over)

    def get(self, keys: Sequence[bytes], blocks: NDArray[np.uint8]) -> int:
        """Copy blocks up to the first miss, and return how many."""
        copied = 0
        with changing(self._database):
            for key, block in zip(keys, blocks, strict=True):
                row = self._database.execute("SELECT data FROM blocks WHERE key = ?", (key,)).fetchone()
                if row is None:
                    break
                block[:] = np.frombuffer(row[0], np.uint8)
                copied += 1
            self._count(got_bytes=blocks[:copied].nbytes)
        return copied

    def drop(self, keys: Sequence[bytes]) -> None:
        """Delete blocks that no instance will load again."""
        with changing(self._database):
            before = self._database.total_changes
            self._database.executemany("DELETE FROM blocks WHERE key = ?", [(key,) for key in keys])
            self._count(released_blocks=self._database.total_changes - before)

    def close(self) -> None:
        """Let go of the database; what was put stays for the others."""
        self._database.close()

    def _has(self, key: bytes) -> bool:
        return self._one("SELECT COUNT(*) FROM blocks WHERE key = ?", key) > 0

    def _now(self) -> int:
        return self._one("SELECT COALESCE(MAX(used), 0) + 1 FROM blocks")

    def _one(self, query: str, *values: bytes) -> int:
        return int(self._database.execute(query, values).fetchone()[0])

    def _count(self, **counts: int) -> None:
        self._database.executemany(
            "INSERT INTO counts VALUES (?, ?) ON CONFLICT DO UPDATE SET value = value + excluded.value",
            counts.items(),
        )


class SqliteKv(KVPool):
    """KVPool, the half beside the runtime: a database in a directory of its own, gone with its stop."""

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self._directory: Path | None = None
        self._last = PoolStats(capacity_bytes)

    async def start(self, instances: Sequence[str]) -> None:
        """Make an empty database."""
        await self.stop()
        self._directory = Path(tempfile.mkdtemp(prefix="sqlite_kv-"))
        with closing(connect(self._path)) as database:
            database.executescript(TABLES)

    async def stop(self) -> None:
        """Remove it."""
        self._last = self.stats()
        if self._directory is not None:
            shutil.rmtree(self._directory)
            self._directory = None

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an engine's process makes."""
        settings = {"path": self._path, "capacity_bytes": self.capacity_bytes}
        return StoreSpec(f"{SqliteStore.__module__}:{SqliteStore.__name__}", settings)

    async def clear(self) -> None:
        """Forget all KV."""
        if self._directory is not None:
            with closing(connect(self._path)) as database:
                database.execute("DELETE FROM blocks")

    def stats(self) -> PoolStats:
        """Return the pool in figures."""
        if self._directory is None:
            return self._last
        with closing(connect(self._path)) as database:
            [used_bytes] = database.execute("SELECT COALESCE(SUM(LENGTH(data)), 0) FROM blocks").fetchone()
            counts: dict[str, int] = dict(database.execute("SELECT name, value FROM counts"))
        return PoolStats(self.capacity_bytes, used_bytes, **counts)

    @property
    def _path(self) -> str:
        return f"{self._directory}/kv.sqlite"


@hookimpl
def seer_make_kv_pool(settings: Settings) -> KVPool:
    """Fill the slot; start nothing."""
    return SqliteKv(settings.capacity_bytes)
