"""The pool beside the runtime: it runs a master, hands out its address, and counts."""

from __future__ import annotations

import asyncio
import secrets
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import structlog
from seer_host.json_files import describe_flaw
from seer_host.launcher import Launcher

from seer_core.errors import PluginError
from seer_core.ports.kv import LOOPBACK, PoolStats, StoreSpec
from seer_mooncake.cleanup import PREFIX
from seer_mooncake.master import Master
from seer_mooncake.settings import Settings
from seer_mooncake.system import checks, installation, master_binary
from seer_mooncake.values import SECRET_BYTES

__all__ = ["MooncakePool"]

log = structlog.get_logger()

WATCH_S = 1.0
EVICTED = "master_evicted_key_count"


class MooncakePool:
    """A ``KVPool`` whose memory the instances lend: each mounts a segment, the master looks up what is where.

    This process holds neither KV nor Mooncake's client, so nothing that goes wrong there can hurt it.
    """

    def __init__(
        self, settings: Settings, directory: Path | None = None, launcher: Launcher | None = None
    ) -> None:
        self.settings, self.directory, self._launcher = settings, directory, launcher
        self._instances: Sequence[str] = ()
        self._shares = 1
        self._lines: dict[str, Callable[[Mapping[str, int]], None]] = {}
        self._epoch = 0
        self._counted: Counter[str] = Counter()
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
        host = LOOPBACK if self._launcher is None else await self._launcher.address()
        self._instances, self._shares, self._counted = tuple(instances), len(instances), Counter()
        self._run = uuid.uuid4().hex[:12]
        self._secret = secrets.token_hex(SECRET_BYTES)
        self._figures, self._evicted_before = {}, 0.0
        degradation = await asyncio.to_thread(self._begin, host)
        self._on = degradation is None
        if degradation is None:
            return
        fact, remedy = degradation
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
        self._instances = ()
        self._lines.clear()

    async def add(self, instance_id: str) -> None:
        """Let an instance that joins later lend as much memory as one of the first."""
        if instance_id not in self._instances:
            self._instances = (*self._instances, instance_id)

    def store(self, instance_id: str) -> StoreSpec:
        """Return what an instance needs to find the master; none of it, if there is no master."""
        if not self._on:
            return StoreSpec("seer_mooncake.store:NoStore", {"reason": self._off})
        settings = self.settings
        directory = self._run_directory
        return StoreSpec(
            "seer_mooncake.store:MooncakeStore",
            {
                "master": self._master.address,
                "run": self._run,
                "secret": self._secret,
                "epoch": self._epoch,
                "segment_bytes": settings.capacity_bytes // self._shares,
                "buffer_bytes": settings.buffer_bytes,
                "disk_path": None if directory is None else str(directory / instance_id),
                "disk_bytes": settings.disk_bytes // self._shares,
                "on_node": self._launcher is not None,
                "node_disk": settings.disk_path and str(self.directory),
                "host": settings.host,
                "protocol": settings.protocol,
                "device": settings.device,
                "start_timeout_s": settings.start_timeout_s,
                "timeout_s": settings.timeout_s,
            },
        )

    async def clear(self) -> None:
        """Begin a new epoch; the stores remove the last one's values."""
        self._epoch += 1
        for send in self._lines.values():
            send({"epoch": self._epoch})

    def connect(self, instance_id: str, send: Callable[[Mapping[str, int]], None]) -> None:
        """Register the channel to a store, and send it the epoch, which may have begun since it was made."""
        if self._on:
            self._lines[instance_id] = send
            send({"epoch": self._epoch})

    def receive(self, instance_id: str, message: Mapping[str, int]) -> None:
        """Count on, and log when a store has lost sight of the master."""
        self._counted.update(message)
        if "away" in message:
            log.warning("kv_pool_away", instance=instance_id, times=message["away"])

    def stats(self) -> PoolStats:
        """Add up what the stores have counted, and the master's metrics of a second ago."""
        if not self._instances:
            return self._last
        counted, figures = self._counted, self._figures
        evicted = self._evicted_before + figures.get(EVICTED, 0)
        return PoolStats(
            capacity_bytes=self._of_all(self.settings.capacity_bytes) if self._on else 0,
            used_bytes=int(figures.get("master_allocated_bytes", 0)),
            asked_blocks=counted["asked_blocks"],
            hit_blocks=counted["hit_blocks"],
            torn_blocks=counted["torn_blocks"],
            evicted_blocks=int(evicted) + counted["refused_blocks"],
            released_blocks=counted["released_blocks"],
            put_bytes=counted["put_bytes"],
            got_bytes=counted["got_bytes"],
            disk_capacity_bytes=self._of_all(self.settings.disk_bytes) if self._on else 0,
            disk_used_bytes=int(figures.get("master_allocated_file_size_bytes", 0)),
        )

    def _of_all(self, total: int) -> int:
        """Return what all instances lend, of which those that joined later lend as much as the first."""
        joined = max(0, len(self._instances) - self._shares)
        return total + total // self._shares * joined

    @property
    def _run_directory(self) -> Path | None:
        """The directory of the run on this machine; on a cluster each node makes its own."""
        if self.directory is None or self._launcher is not None:
            return None
        return self.directory / f"{PREFIX}{self._run}"

    def _begin(self, host: str) -> tuple[str, str] | None:
        """Start or find the master, ours at ``host``; return what is wrong, and the remedy."""
        settings = self.settings
        if self._launcher is None:
            found = checks(settings, self.directory)
        else:
            found = [] if settings.master else [installation()]
        for check in found:
            if not check.ok:
                return check.finding, check.remedy
        self._master = Master(settings.master)
        try:
            there = self._master.start(
                master_binary(),
                self._run_directory,
                settings.start_timeout_s,
                host=host,
                disk=settings.disk_bytes > 0,
            )
        except OSError as error:
            return (
                f"Mooncake's master cannot listen at {host}: {describe_flaw(error)}",
                "correct the address of this machine in the launcher's table",
            )
        if there:
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
        """Ask the master for its figures."""
        while not stopped.wait(WATCH_S):
            figures = self._master.stats()
            if figures:
                lost = self._figures.get(EVICTED, 0) - figures.get(EVICTED, 0)
                if lost > 0:  # another master, which counts from 0
                    self._evicted_before += self._figures[EVICTED]
                self._figures = figures
