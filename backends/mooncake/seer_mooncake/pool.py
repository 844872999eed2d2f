"""The pool beside the runtime: it keeps a master, says where it is, and counts."""

from __future__ import annotations

import asyncio
import secrets
import threading
import uuid
from collections.abc import Sequence
from pathlib import Path

import structlog

from seer_core.errors import PluginError
from seer_core.kv import PoolStats, StoreSpec
from seer_mooncake.control import Control, Word
from seer_mooncake.keeper import PREFIX
from seer_mooncake.master import Master
from seer_mooncake.settings import Settings
from seer_mooncake.system import checks, master_binary
from seer_mooncake.values import SECRET_BYTES

__all__ = ["MooncakePool"]

log = structlog.get_logger()

WATCH_S = 1.0
EVICTED = "master_evicted_key_count"


class MooncakePool:
    """A ``KVPool`` whose memory the instances lend: each mounts a segment, the master says what is where.

    This process holds neither KV nor Mooncake's client, so nothing that goes wrong there can hurt it.
    """

    def __init__(self, settings: Settings, directory: Path | None = None) -> None:
        self.settings, self.directory = settings, directory
        self._control: Control | None = None
        self._master = Master()
        self._stopped = threading.Event()
        self._run = self._secret = self._off = ""
        self._on = False
        self._figures: dict[str, float] = {}
        self._evicted_before = 0.0  # by masters that have died
        self._last = PoolStats(settings.capacity_bytes)

    async def start(self, instances: Sequence[str]) -> None:
        """Start the master, or find the one to join.

        Raises:
            PluginError: Mooncake is not installed, or no master answers, and ``on_failure`` is "fail".
        """
        await self.stop()
        self._control = Control(instances)
        self._run = uuid.uuid4().hex[:12]
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._figures, self._evicted_before = {}, 0.0
        trouble = await asyncio.to_thread(self._begin)
        self._on = trouble is None
        if trouble is None:
            return
        fact, remedy = trouble
        self._off = fact
        if self.settings.on_failure == "fail":
            await self.stop()
            raise PluginError(f'{fact}; {remedy}; or set kv_pool = "local"')
        await asyncio.to_thread(self._master.stop)
        log.warning("kv_pool_off", reason=fact, remedy=remedy)

    async def stop(self) -> None:
        """End the master if it is ours; instances have ended, and their memory with them."""
        self._last = self.stats()
        self._stopped.set()
        await asyncio.to_thread(self._master.stop)
        if self._control is not None:
            self._control.close()
            self._control = None

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an instance needs to find the master; none of it, if there is no master."""
        assert self._control is not None
        if not self._on:
            return StoreSpec("seer_mooncake.store:NoStore", {"reason": self._off})
        settings = self.settings
        count = len(self._control.rows)
        directory = self._run_directory
        return StoreSpec(
            "seer_mooncake.store:MooncakeStore",
            {
                "master": self._master.address,
                "run": self._run,
                "secret": self._secret,
                "control": self._control.path,
                "row": self._control.rows[instance_id],
                "segment_bytes": settings.capacity_bytes // count,
                "buffer_bytes": settings.buffer_bytes,
                "disk_path": None if directory is None else str(directory / instance_id),
                "disk_bytes": settings.disk_bytes // count,
                "host": settings.host,
                "protocol": settings.protocol,
                "device": settings.device,
                "start_timeout_s": settings.start_timeout_s,
                "timeout_s": settings.timeout_s,
            },
        )

    async def clear(self) -> None:
        """Begin a new epoch; the first store that is asked for anything removes the last one's values."""
        if self._control is not None:
            self._control.next_epoch()

    def stats(self) -> PoolStats:
        """Add up what the stores have counted, and what the master said a second ago."""
        if self._control is None:
            return self._last
        total, figures = self._control.total, self._figures
        evicted = self._evicted_before + figures.get(EVICTED, 0)
        return PoolStats(
            capacity_bytes=self.settings.capacity_bytes if self._on else 0,
            used_bytes=int(figures.get("master_allocated_bytes", 0)),
            asked_blocks=total(Word.ASKED),
            hit_blocks=total(Word.HIT),
            torn_blocks=total(Word.TORN),
            evicted_blocks=int(evicted) + total(Word.REFUSED),
            released_blocks=total(Word.RELEASED),
            put_bytes=total(Word.PUT_BYTES),
            got_bytes=total(Word.GOT_BYTES),
            disk_capacity_bytes=self.settings.disk_bytes if self._on else 0,
            disk_used_bytes=int(figures.get("master_allocated_file_size_bytes", 0)),
        )

    @property
    def _run_directory(self) -> Path | None:
        return None if self.directory is None else self.directory / f"{PREFIX}{self._run}"

    def _begin(self) -> tuple[str, str] | None:
        """Start or find the master; return what is wrong, and the remedy."""
        for check in checks(self.settings, self.directory):
            if not check.ok:
                return check.finding, check.remedy
        settings = self.settings
        self._master = Master(settings.master)
        if self._master.start(master_binary(), self._run_directory, settings.start_timeout_s):
            self._stopped = threading.Event()
            threading.Thread(target=self._watch, args=(self._stopped,), daemon=True).start()
            return None
        if settings.master:
            return (
                f"no Mooncake master answers at {settings.master}",
                "start it, or correct [kv_pool.mooncake].master",
            )
        return (
            f"Mooncake's master did not answer within {settings.start_timeout_s:g} s",
            "see whether `mooncake_master` starts by hand, or raise [kv_pool.mooncake].start_timeout_s",
        )

    def _watch(self, stopped: threading.Event) -> None:
        """Ask the master for its figures, and log when stores lose sight of it."""
        control, away = self._control, 0
        assert control is not None
        while not stopped.wait(WATCH_S):
            figures = self._master.figures()
            if figures:
                lost = self._figures.get(EVICTED, 0) - figures.get(EVICTED, 0)
                if lost > 0:  # another master, which counts from 0
                    self._evicted_before += self._figures[EVICTED]
                self._figures = figures
            if (now := control.total(Word.AWAY)) != away:
                log.warning("kv_pool_away", times=now - away)
                away = now
