"""The master of a run: a child process that is started again when it dies, or a master that others run."""

from __future__ import annotations

import http.client
import os
import socket
import threading
import time
from pathlib import Path

import structlog
from seer_host.json_files import describe_flaw
from seer_host.process import ChildProcess

from seer_core.ports.kv import LOOPBACK
from seer_mooncake.client import answers
from seer_mooncake.disk import DiskDirectory

__all__ = ["Master"]

log = structlog.get_logger()

LEASE_MS = 1000
"""How long a value that was looked up is neither evicted nor removed.  A copy that takes longer is refused
(200 ms were too few on busy CPUs); meanwhile others are evicted in its stead, and those just put first.
"""
CLIENT_TTL_S = 5
"""After so long without a sign of life an instance's memory is taken to be gone."""
EVICTED_AT_ONCE = 0.1
"""Part of the memory that an eviction frees: more than the default, for bursts."""
POLL_S = 0.02
HTTP_TIMEOUT_S = 1.0
RESTARTS = 10
RESTART_PAUSE_S = 0.5


class Master:
    """Where the master is, and its process if it is ours.  Every call blocks, and is bounded."""

    def __init__(self, joined: str = "") -> None:
        self.address = joined
        self._joined = bool(joined)
        self._metrics_port = 0
        self._reserved: list[socket.socket] = []
        self._process: ChildProcess | None = None
        self._disk: DiskDirectory | None = None
        self._restarts: threading.Thread | None = None
        self._stopped = threading.Event()

    def start(
        self,
        binary: Path | None,
        directory: Path | None,
        timeout_s: float,
        *,
        host: str = LOOPBACK,
        disk: bool | None = None,
    ) -> bool:
        """Start the master or find it, and make ``directory``; return whether it answers in time.

        One of ours listens at ``host``; it is to expect instances with a ``disk``, by default if there is a
        directory.

        Raises:
            OSError: ``host`` is no address of this machine, or it can start no process.
        """
        until = time.monotonic() + timeout_s
        if directory is not None:
            self._disk = DiskDirectory(directory)
        if not self._joined:
            self._reserved = [_reserve_port(host), _reserve_port(LOOPBACK)]
            rpc_port, self._metrics_port = (one.getsockname()[1] for one in self._reserved)
            self.address = f"{host}:{rpc_port}"
            offload = directory is not None if disk is None else disk
            command = _command(str(binary), host, rpc_port, self._metrics_port, disk=offload)
            try:
                self._process = _run(command)
            except OSError:
                self._release_ports()
                return False
            self._restarts = threading.Thread(target=self._restart, args=[command], daemon=True)
            self._restarts.start()
        while time.monotonic() < until:
            if self._answers() and (self._disk is None or self._disk.ready):
                return True
            time.sleep(POLL_S)
        return False

    def stats(self) -> dict[str, float]:
        """Return our master's metrics; nothing if it does not answer, or is not ours."""
        if not self._metrics_port:
            return {}
        lines = _get(self._metrics_port, "/metrics").splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if line and line[0] != "#")
        try:
            return {name: float(value) for name, value in pairs}
        except ValueError:  # it ended while it answered
            return {}

    def stop(self) -> None:
        """End the master if it is ours, and remove the directory."""
        self._stopped.set()
        if self._process is not None:
            self._process.kill()
        if self._restarts is not None:
            self._restarts.join()
            self._restarts = self._process = None
        self._release_ports()
        disk, self._disk = self._disk, None
        if disk is not None:
            disk.close()

    def _release_ports(self) -> None:
        while self._reserved:
            self._reserved.pop().close()

    def _answers(self) -> bool:
        if self._metrics_port:
            return '"service_ready":true' in _get(self._metrics_port, "/health")
        return answers(self.address, HTTP_TIMEOUT_S)

    def _restart(self, command: list[str]) -> None:
        """Start the master again when it dies, ``RESTARTS`` times, until ``stop``."""
        process = self._process
        for left in reversed(range(RESTARTS + 1)):
            if process is not None:
                process.wait_unreaped()
                how = process.end()
            if self._stopped.is_set():
                return
            log.warning("kv_pool_master_ended", reason=how, restarts_left=left)
            if left and not self._stopped.wait(RESTART_PAUSE_S):
                try:
                    self._process = process = _run(command)
                except OSError as error:
                    process, how = None, f"cannot be started: {describe_flaw(error)}"
                    continue
                log.info("kv_pool_master_restarted", pid=process.pid)
                if self._stopped.is_set():  # ``stop`` has killed the one before
                    process.kill()
        if not self._stopped.is_set():
            log.error("kv_pool_master_not_kept", consequence="without a master everything is a miss")


def _run(command: list[str]) -> ChildProcess:
    with open(os.devnull, "wb") as nothing:
        return ChildProcess(command, log=nothing)


def _command(binary: str, host: str, rpc_port: int, metrics_port: int, *, disk: bool) -> list[str]:
    return [
        binary,
        f"--rpc_address={host}",
        f"--rpc_port={rpc_port}",
        f"--metrics_host={LOOPBACK}",
        f"--metrics_port={metrics_port}",
        f"--rpc_thread_num={min(4, os.cpu_count() or 1)}",
        f"--default_kv_lease_ttl={LEASE_MS}",
        f"--client_ttl={CLIENT_TTL_S}",
        f"--eviction_ratio={EVICTED_AT_ONCE}",
        "--enable_metric_reporting=false",
        f"--enable_offload={'true' if disk else 'false'}",
    ]


def _reserve_port(host: str) -> socket.socket:
    """Return a socket bound to a port that the system gives to no other, but to a server that names it.

    Both set SO_REUSEADDR and only the server listens.  So the port stays the master's while it starts again.
    """
    one = socket.socket()
    try:
        one.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        one.bind((host, 0))
    except OSError:
        one.close()
        raise
    return one


def _get(port: int, path: str) -> str:
    """Return what the master's metrics server answers; nothing if it does not."""
    connection = http.client.HTTPConnection(LOOPBACK, port, timeout=HTTP_TIMEOUT_S)
    try:
        connection.request("GET", path)
        return connection.getresponse().read().decode()
    except (OSError, http.client.HTTPException):
        return ""
    finally:
        connection.close()
