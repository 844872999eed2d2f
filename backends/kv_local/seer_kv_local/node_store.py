"""One instance's end of the pool of its node: it makes its own files, and opens those of its neighbours."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import structlog
from seer_host.machine_memory import available_bytes

from seer_core.errors import EngineError, PluginError
from seer_core.ports.kv import StoreContext
from seer_kv_local.slot_table import FileBlocks, SlotTable, Word
from seer_kv_local.store import LocalStore
from seer_kv_local.tiers import Tier, make_tier, path_of, reserve

__all__ = ["NodeStore"]

log = structlog.get_logger("seer")

OWN_COUNTS = {
    Word.USED: "used_bytes",
    Word.ASKED: "asked_blocks",
    Word.HIT: "hit_blocks",
    Word.TORN: "torn_blocks",
    Word.EVICTED: "evicted_blocks",
    Word.PUT_BYTES: "put_bytes",
    Word.GOT_BYTES: "got_bytes",
    Word.RELEASED: "released_blocks",
    Word.DISK_GOT_BYTES: "disk_got_bytes",
    Word.ERRORS: "disk_errors",
}
DISK_COUNTS = {
    Word.USED: "disk_used_bytes",
    Word.EVICTED: "evicted_blocks",
    Word.PUT_BYTES: "disk_put_bytes",
    Word.RELEASED: "released_blocks",
}


@attrs.define(eq=False)
class Neighbour:
    """The open files of another instance on this node."""

    tables: list[SlotTable] = attrs.field(factory=list)
    disks: list[SlotTable] = attrs.field(factory=list)
    files: list[FileBlocks] = attrs.field(factory=list)


class NodeStore(LocalStore):
    """A ``LocalStore`` that owns its files, and whose neighbours come and go by messages of the pool.

    A table counts only while its epoch is this store's own: the messages that begin one reach no two stores
    at the same time.
    """

    def __init__(self, settings: Mapping[str, Any], host: StoreContext) -> None:
        self._host, self._nonce = host, bytes.fromhex(settings["nonce"])
        self._epoch: int = settings["epoch"]
        self._memory, self._disk = self._make_tiers(settings)
        own, name = path_of(self._memory.memory_fd), host.instance_id
        disks = {}
        if self._disk is not None:
            disks[name] = (path_of(self._disk.memory_fd), path_of(self._disk.disk_fd))
        self._neighbours: dict[int, Neighbour] = {}
        self._sent: dict[str, int] = {}
        self._announced = False
        try:
            super().__init__(dict(settings) | {"tables": {name: own}, "disks": disks}, host)
        except BaseException:
            self._close_tiers()
            raise

    def receive(self, message: Mapping[str, int]) -> None:
        """Begin the pool's epoch, or open or drop the files of a neighbour."""
        if "epoch" in message:
            self._begin(message["epoch"])
        elif "peer" in message:
            self._forget_neighbour(message["peer"])
            self._open_neighbour(message["peer"], message)
        elif "forget" in message:
            self._forget_neighbour(message["forget"])

    def take_message(self) -> dict[str, int]:
        """Return where the own files are, once, and then what has been counted since."""
        if not self._announced:
            self._announced = True
            return self._place()
        totals: dict[str, int] = {}
        for tier, names in ((self._memory, OWN_COUNTS), (self._disk, DISK_COUNTS)):
            if tier is not None:
                for word, name in names.items():
                    totals[name] = totals.get(name, 0) + tier.header[word]
        grown = {name: total - self._sent.get(name, 0) for name, total in totals.items()}
        self._sent = totals
        return {name: count for name, count in grown.items() if count}

    def close(self) -> None:
        """Close all files; the own memory goes with the last process that has it open."""
        super().close()
        self._neighbours.clear()
        self._close_tiers()

    def _make_tiers(self, settings: Mapping[str, Any]) -> tuple[Tier, Tier | None]:
        """Take the instance's part of this node's memory and disk."""
        size, disk_size, name = settings["size"], settings["disk_size"], self._host.instance_id
        if not hasattr(os, "memfd_create"):
            raise EngineError('the KV pool "local" needs memfd_create, which Linux has: set kv_pool = "none"')
        available = available_bytes()
        if size > available:
            raise EngineError(
                f"node {self._host.node}: {size} bytes of [kv_pool.local].capacity_bytes ="
                f" {settings['capacity_bytes']} fall to each instance, but only {available} bytes of memory"
                ' are available; lower it, or set kv_pool = "none"'
            )
        disk = None
        try:
            memory = make_tier(f"seer-kv-{name}", self._nonce, size)
            if disk_size:
                disk_fd = reserve(Path(settings["disk_path"] or tempfile.gettempdir()), disk_size)
                disk = make_tier(f"seer-kv-{name}-disk", self._nonce, disk_size, disk_fd)
        except PluginError as error:
            raise EngineError(f"node {self._host.node}: {error}") from error
        for tier in (memory, disk):
            if tier is not None:
                tier.begin(self._epoch)
        return memory, disk

    def _close_tiers(self) -> None:
        self._memory.close()
        if self._disk is not None:
            self._disk.close()
        del self._memory, self._disk  # with their maps, each of which has its file open

    def _place(self) -> dict[str, int]:
        """Return by numbers where neighbours find the own files: node, process and descriptors."""
        digest = hashlib.sha256(self._host.node.encode()).digest()
        place = {
            "node": int.from_bytes(digest[:7], "big"),
            "process": os.getpid(),
            "memory": self._memory.memory_fd,
        }
        if self._disk is not None and self._disk.disk_fd is not None:
            place |= {"disk_table": self._disk.memory_fd, "disk": self._disk.disk_fd}
        return place

    def _open_neighbour(self, number: int, place: Mapping[str, int]) -> None:
        """Open a neighbour's files; one that has ended since, or is out of reach, has nothing to give."""
        found, files, size = Neighbour(), f"/proc/{place['process']}/fd/", self._own.block_bytes
        self._neighbours[number] = found
        try:
            found.tables.append(SlotTable(f"{files}{place['memory']}", self._nonce, size))
            if "disk" in place:  # its file has no nonce: it is of the process that has just shown one
                found.files.append(self._file(f"{files}{place['disk']}", size))
                table = f"{files}{place['disk_table']}"
                found.disks.append(SlotTable(table, self._nonce, size, found.files[0]))
        except (OSError, ValueError) as error:
            log.warning("kv_neighbour_not_opened", process=place["process"], error=str(error))
            if not isinstance(error, FileNotFoundError):
                self._report(f"the KV of process {place['process']} on this node is out of reach: {error}")

    def _forget_neighbour(self, number: int) -> None:
        for file in self._neighbours.pop(number, Neighbour()).files:
            self._errors_before += file.errors
            self._files.remove(file)
            file.close()

    def _begin(self, epoch: int) -> None:
        if epoch != self._epoch:
            self._epoch = epoch
            for tier in (self._memory, self._disk):
                if tier is not None:
                    tier.begin(epoch)

    def _refresh(self) -> None:
        """Take in what has changed in the tables that are of this epoch."""
        near = self._neighbours.values()
        self._tables = [self._own, *self._current(table for each in near for table in each.tables)]
        own = self._disks[:1] if self._disk is not None else []
        self._disks = [*own, *self._current(table for each in near for table in each.disks)]
        super()._refresh()

    def _current(self, tables: Iterable[SlotTable]) -> list[SlotTable]:
        return [table for table in tables if table.header[Word.EPOCH] == self._epoch]
