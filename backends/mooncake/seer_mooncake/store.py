"""One instance's end of the pool: it lends a segment of memory, and puts and gets values through a buffer."""

from __future__ import annotations

import importlib
import os
import secrets
import shutil
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes, StoreContext
from seer_mooncake.cleanup import PREFIX
from seer_mooncake.client import MooncakeClient, answers
from seer_mooncake.counts import Counts
from seer_mooncake.disk import DiskDirectory
from seer_mooncake.system import disk_check, installation, memory_check
from seer_mooncake.values import HEADER_BYTES, pack, unpack

__all__ = ["MooncakeStore", "NoStore"]

FULL = -200
"""NO_AVAILABLE_HANDLE: eviction has not caught up."""
TOO_LONG = -600
"""INVALID_PARAMS: a value larger than the buffer given for it."""
PAUSES_S = (0.01, 0.02, 0.04)
"""Waits for the eviction, which frees a tenth of the memory within some 10 ms (measured)."""
IMPATIENT_S = 1.0
"""For so long after a value was refused no put waits for room again."""
TIMEOUTS = {
    "MC_RPC_TIMEOUT_MS": "5000",
    "MC_RPC_CONNECT_TIMEOUT_MS": "1000",
    "MC_TCP_PROGRESS_TIMEOUT_SEC": "5",
}
"""Mooncake's own, shorter than its defaults of 30 s, 20 s and 30 s."""
DROPPED_SHARE = 0.25
"""Part of an instance's memory that may hold dropped values."""
POLL_S = 0.02
BUCKET_VALUES = 32
"""Values in one file on disk: what is evicted there at once."""


class NoStore:
    """A ``KVStore`` that has nothing, for a run that goes on without its master."""

    def __init__(self, settings: Mapping[str, Any], host: StoreContext) -> None:
        host.report(f"the run goes on without its KV pool: {settings['reason']}")

    def find(self, keys: Sequence[bytes]) -> int:
        """Return 0: nothing is found."""
        return 0

    def lacks(self, keys: Sequence[bytes]) -> list[int]:
        """Ask for none."""
        return []

    def put(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Keep nothing."""

    def get(self, keys: Sequence[bytes], blocks: Bytes) -> int:
        """Return 0: nothing is copied."""
        return 0

    def drop(self, keys: Sequence[bytes]) -> None:
        """Have none to drop."""

    def close(self) -> None:
        """Have nothing to let go of."""


class MooncakeStore:
    """A ``KVStore`` over Mooncake's batch calls, which copy to and from a registered buffer.

    Any answer of Mooncake's but the expected length is a miss, and a value counts only once its copy has
    been checked.  While the master is away all keys miss, and none are asked for to be saved.
    """

    def __init__(self, settings: Mapping[str, Any], host: StoreContext) -> None:
        self._settings = settings
        self._row_bytes = HEADER_BYTES + host.block_bytes
        self._block_bytes = host.block_bytes
        self._report = host.report
        self._secret = bytes.fromhex(settings["secret"])
        self._host = settings["host"] or host.address
        if settings["segment_bytes"] < 2 * self._row_bytes:
            raise EngineError(
                f"the KV pool is too small: a block of {host.block_tokens} tokens takes {host.block_bytes}"
                " bytes; raise [kv_pool.mooncake].capacity_bytes"
            )
        self._disk_path, self._disk = settings["disk_path"], None
        self._mooncake = _import(host.node)  # 40 MB: the runtime does without it
        if settings["on_node"]:
            _check_node(settings, host.node)
            if settings["disk_bytes"]:
                self._disk = _own_directory(settings, host.instance_id)
                self._disk_path = str(self._disk.path / "values")
        self._counts = Counts()
        rows = max(1, settings["buffer_bytes"] // self._row_bytes)
        self._rows: Bytes = np.zeros((rows, self._row_bytes), np.uint8)
        self._pointers = [self._rows.ctypes.data + i * self._row_bytes for i in range(rows)]
        self._sizes = [self._row_bytes] * rows
        self._epoch: int = settings["epoch"]
        self._here: Any = None  # asks for this instance's own segment
        self._impatient_until = 0.0
        self._dropped: list[str] = []
        os.environ.update({name: os.environ.get(name, value) for name, value in TIMEOUTS.items()})
        self._client = MooncakeClient(
            self._set_up,
            settings["start_timeout_s"],
            settings["timeout_s"],
            self._on_away,
        )

    def find(self, keys: Sequence[bytes]) -> int:
        """Return how many of the keys, from the first on, the master believes to be there."""
        codes = self._client.batch("batch_is_exist", self._names(keys)) if keys else []
        found = next((i for i, code in enumerate(codes) if code != 1), len(codes))
        self._counts.add(asked_blocks=len(keys), hit_blocks=found)
        return found

    def lacks(self, keys: Sequence[bytes]) -> list[int]:
        """Return the positions of those keys that are not there; none while the master is away."""
        codes = self._client.batch("batch_is_exist", self._names(keys)) if keys else []
        return [position for position, code in enumerate(codes) if code != 1]

    def put(self, keys: Sequence[bytes], blocks: Bytes) -> None:
        """Write values; of more than there is room for the first stay."""
        names = self._names(keys)
        for begin in range(0, len(keys), len(self._rows)):
            some = range(begin, min(begin + len(self._rows), len(keys)))
            for row, i in zip(self._rows, some, strict=False):
                pack(self._secret, keys[i], blocks[i], row)
            kept, full = self._put_rows(names[some.start : some.stop])
            self._counts.add(put_bytes=kept * self._block_bytes)
            if full:
                self._counts.add(refused_blocks=len(keys) - begin - kept)
            if kept < len(some):
                return

    def get(self, keys: Sequence[bytes], blocks: Bytes) -> int:
        """Copy blocks, each checked, up to the first miss."""
        names = self._names(keys)
        copied = 0
        while copied < len(keys):
            some = names[copied : copied + len(self._rows)]
            here = self._pointers[: len(some)], self._sizes[: len(some)]
            codes = self._client.batch("batch_get_into", some, *here)
            whole = 0
            for row, code in zip(self._rows, codes, strict=False):
                at = copied + whole
                if code != self._row_bytes or not unpack(self._secret, keys[at], row, blocks[at]):
                    self._counts.add(torn_blocks=1)
                    if code >= 0 or code == TOO_LONG:  # it is no good, and in the way of a good one
                        self._remove(names[at])
                    break
                whole += 1
            copied += whole
            if whole < len(some):
                break
        self._counts.add(got_bytes=copied * self._block_bytes)
        return copied

    def drop(self, keys: Sequence[bytes]) -> None:
        """Note values to remove when there is no room, or they take too much; siblings may share them."""
        self._dropped += self._names(keys)
        if len(self._dropped) * self._row_bytes > self._settings["segment_bytes"] * DROPPED_SHARE:
            self._remove_dropped()

    def receive(self, message: Mapping[str, int]) -> None:
        """Begin the pool's epoch, and remove the last one's values, if it is another."""
        if message["epoch"] != self._epoch:
            old = f"^{self._prefix}"
            self._client.later(lambda store: store and store.remove_by_regex(old, True))
            self._epoch, self._dropped = message["epoch"], []

    def take_message(self) -> dict[str, int]:
        """Return what has been counted."""
        return self._counts.take()

    def close(self) -> None:
        """Unmount the segment, and with it what lies there, unless the master has ended."""
        self._client.close(answers(self._settings["master"], self._settings["timeout_s"]))
        if self._disk is not None:
            self._disk.close()

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        prefix = self._prefix
        return [prefix + key.hex() for key in keys]

    @property
    def _prefix(self) -> str:
        return f"seer-{self._settings['run']}-{self._epoch}-"

    def _put_rows(self, names: Sequence[str]) -> tuple[int, bool]:
        """Put the first rows of the buffer under these names.

        Return how many, from the first on, are in, and whether there is no room for the next.
        """
        done = 0
        pauses = PAUSES_S if time.monotonic() >= self._impatient_until else ()
        for pause_s in (*pauses, 0.0):
            left = slice(done, len(names))
            codes = self._client.batch(
                "batch_put_from", names[left], self._pointers[left], self._sizes[left], self._here
            )
            bad = next((code for code in codes if code != 0), None)
            done += codes.index(bad) if bad is not None else len(codes)
            if bad != FULL:
                return done, False
            self._remove_dropped()
            time.sleep(pause_s)
        self._impatient_until = time.monotonic() + IMPATIENT_S
        return done, True

    def _on_away(self, why: str) -> None:
        self._counts.add(away=1)
        self._report(f"the KV pool is away, and everything a miss until it is back: {why}")

    def _remove(self, name: str) -> None:
        self._client.later(lambda store: store.remove(name, True))

    def _remove_dropped(self) -> None:
        """Remove them, except those that were just looked up; these age."""
        names, self._dropped = self._dropped, []
        if names:
            self._client.later(lambda store: self._released(store.batch_remove(names)))

    def _released(self, codes: Sequence[int]) -> None:
        self._counts.add(released_blocks=sum(code == 0 for code in codes))

    def _set_up(self) -> Any:
        """Return a client of Mooncake with its segment mounted and the buffer registered."""
        settings = self._settings
        if not answers(settings["master"], settings["timeout_s"]):  # else it would block for 90 s
            raise ConnectionError(f"no master answers at {settings['master']}")
        disk = {}
        if self._disk_path is not None:
            _prepare(self._disk_path, settings["disk_bytes"], self._row_bytes)
            disk = {"enable_ssd_offload": True, "ssd_offload_path": self._disk_path}
        store = self._mooncake.MooncakeDistributedStore()
        code = store.setup(
            self._host,
            "P2PHANDSHAKE",
            settings["segment_bytes"],
            0,  # for calls that copy once more than ours
            settings["protocol"],
            settings["device"],
            settings["master"],
            **disk,
        )
        if code != 0:
            raise ConnectionError(f"Mooncake's setup gives {code}")
        if store.register_buffer(self._rows.ctypes.data, self._rows.nbytes) != 0:
            store.close()  # or it would hold its segment until garbage is collected
            raise ConnectionError("Mooncake does not register the buffer")
        self._here = self._mooncake.ReplicateConfig()
        self._here.preferred_segments = [store.get_hostname()]
        return store


def _import(node: str) -> Any:
    """Import Mooncake's client.

    Raises:
        EngineError: this node has none, or not the libraries that it is linked to.
    """
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        check = installation()
        fact = str(error) if check.ok else check.finding
        raise EngineError(f"node {node}: {fact}; {check.remedy or 'reinstall Mooncake there'}") from error


def _check_node(settings: Mapping[str, Any], node: str) -> None:
    """Refuse to lend more than this node has.

    Raises:
        EngineError: memory or room on disk is missing.
    """
    found = [memory_check(settings["segment_bytes"])]
    if settings["disk_bytes"]:
        found.append(disk_check(settings["disk_bytes"], _node_disk(settings)))
    for check in found:
        if not check.ok:
            raise EngineError(f"node {node}: {check.finding}; {check.remedy}")


def _node_disk(settings: Mapping[str, Any]) -> Path:
    return Path(settings["node_disk"] or tempfile.gettempdir())


def _own_directory(settings: Mapping[str, Any], instance_id: str) -> DiskDirectory:
    """Return a directory on this node that goes with this process.

    Raises:
        EngineError: it was not made in time.
    """
    name = f"{PREFIX}{settings['run']}-{instance_id}-{secrets.token_hex(4)}"
    disk = DiskDirectory(_node_disk(settings) / name)
    until = time.monotonic() + settings["start_timeout_s"]
    while not disk.ready:
        if time.monotonic() > until:
            disk.close()
            raise EngineError(
                f"{disk.path} was not made within {settings['start_timeout_s']:g} s; correct"
                " [kv_pool.mooncake].disk_path, or raise start_timeout_s"
            )
        time.sleep(POLL_S)
    return disk


def _prepare(path: str, disk_bytes: int, row_bytes: int) -> None:
    """Begin with an empty directory: the files of an instance that was killed there are lost."""
    directory = Path(path)
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    bucket_bytes = BUCKET_VALUES * (row_bytes + 512)
    os.environ.update(
        {
            # the backend with a file per key heeds no limit, and removes no file
            "MOONCAKE_OFFLOAD_STORAGE_BACKEND_DESCRIPTOR": "bucket_storage_backend",
            "MOONCAKE_OFFLOAD_BUCKET_KEYS_LIMIT": str(BUCKET_VALUES),
            "MOONCAKE_OFFLOAD_BUCKET_SIZE_LIMIT_BYTES": str(bucket_bytes),
            "MOONCAKE_OFFLOAD_BUCKET_EVICTION_POLICY": "lru",
            "MOONCAKE_OFFLOAD_BUCKET_MAX_TOTAL_SIZE": str(disk_bytes),
            "MOONCAKE_OFFLOAD_TOTAL_SIZE_LIMIT_BYTES": str(disk_bytes),
            "MOONCAKE_OFFLOAD_LOCAL_BUFFER_SIZE_BYTES": str(max(32 << 20, 2 * bucket_bytes)),
            "MOONCAKE_OFFLOAD_HEARTBEAT_INTERVAL_SECONDS": "1",
        }
    )
