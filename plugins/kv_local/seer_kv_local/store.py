"""One instance's end of the pool: it writes its own area and reads everybody's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seer_core.errors import EngineError
from seer_core.kv import StoreHost
from seer_kv_local.area import Area, Bytes, Word, Writer

__all__ = ["LocalStore"]


class LocalStore:
    """A ``KVStore``; ``settings["areas"]`` maps every instance to the path of its area."""

    def __init__(self, settings: Mapping[str, Any], host: StoreHost) -> None:
        paths = dict(settings["areas"])
        own = paths.pop(host.instance_id)
        try:
            self._own = Writer(own, host.block_bytes)
            self._areas: list[Area] = [self._own, *(Area(path, host.block_bytes) for path in paths.values())]
        except OSError as error:
            raise EngineError(
                f"the KV pool's memory cannot be opened: {error}; instances must run on the runtime's"
                ' machine, as its user and in its container: else set kv_pool = "none"'
            ) from error
        if self._own.slots < 1:
            raise EngineError(
                f"the KV pool is too small: a block of {host.block_tokens} tokens takes {host.block_bytes}"
                f" bytes; raise [kv_pool.local].capacity_bytes above {settings['capacity_bytes']}"
            )
        self._counts = self._own.header

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, are there."""
        self._refresh()
        found = 0
        for key in keys:
            if not self._holds(key):
                break
            found += 1
        self._counts.add(Word.ASKED, len(keys))
        self._counts.add(Word.HIT, found)
        return found

    def lacks(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of those keys that are not there; the others count as used just now."""
        self._refresh()
        missing = [position for position, key in enumerate(keys) if not self._holds(key)]
        for key in reversed(keys):
            self._own.use(key)
        return missing

    def put(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Keep copies in this instance's own area."""
        self._own.put(keys, blocks)

    def get(self, keys: Sequence[bytes], blocks: Bytes) -> int:
        """Copy blocks, each checked, up to the first miss."""
        self._refresh()
        copied = len(keys)
        for position, key in enumerate(keys):
            if not self._copy(key, blocks[position]):
                copied = position
                break
        self._counts.add(Word.GOT_BYTES, copied * self._own.block_bytes)
        return copied

    def close(self) -> None:
        """Let go of all memory; what was put stays for the others."""
        self._areas = []
        del self._own, self._counts

    def _refresh(self) -> None:
        for area in self._areas:
            area.refresh()

    def _holds(self, key: bytes) -> bool:
        return any(key in area for area in self._areas)

    def _copy(self, key: bytes, into: Bytes) -> bool:
        for area in self._areas:
            answer = area.copy(key, into)
            if answer:
                return True
            if answer is None:
                self._counts.add(Word.TORN, 1)
        return False
