"""The actor beside each worker: it starts the worker as its child, passes its output on, and ends it.

It runs in Ray's own environment and imports no engine.  The worker is a process of its own, so it can have
another interpreter, and no Ray in it.  The kernel kills the worker, and all that it has started, when the
actor's process ends, and Ray ends that with its node or its driver.
"""

from __future__ import annotations

import asyncio
import os
import socket
import sys
import threading
from collections.abc import AsyncIterator, Mapping
from typing import Any

import ray
from msgspec import Struct, convert
from seer_host.process import ChildProcess
from seer_host.scratch import Scratch

from seer_ray.keeper import Cargo, WeightKeeper, hosts

__all__ = ["Started", "Supervisor"]

LOG_BYTES = 1 << 16
LINGER_S = 10.0
"""How long it outlives its worker.  The runtime ends it sooner; without runtime and head it ends itself."""


class Started(Struct, frozen=True):
    """The facts that a supervisor measures where it runs; ``flaw`` is why it has started no worker."""

    host: str
    node_id: str
    supervisor_pid: int
    pid: int = 0
    scratch: str = ""
    flaw: str = ""


class Supervisor:
    """Has one worker.  Its methods are async, so that its loop, which has no other work, is never blocked.

    It ends itself if no worker's start follows within ``unused_s``: the runtime has ended.
    """

    def __init__(self, unused_s: float) -> None:
        self._process: ChildProcess | None = None
        self._end: asyncio.Task[str] | None = None
        self._scratch: Scratch | None = None
        self._output = asyncio.StreamReader()
        self._weights = WeightKeeper()
        # Ray makes it in a thread without an event loop.
        self._unused = threading.Timer(unused_s, os._exit, (0,))
        self._unused.daemon = True
        self._unused.start()

    async def start(
        self, interpreter: str, environment: Mapping[str, str], address: tuple[str, int], secret: bytes
    ) -> Mapping[str, Any]:
        """Start the worker, which connects to ``address``; return the fields of ``Started``.

        ``interpreter`` is a path on this node; empty stands for the one that runs here.
        """
        facts: dict[str, Any] = {
            "host": socket.gethostname(),
            "node_id": ray.get_runtime_context().get_node_id(),
            "supervisor_pid": os.getpid(),
        }
        held, given = os.pipe()
        output, written = os.pipe()
        os.write(given, secret)
        os.close(given)
        module = "seer_worker.process.remote"
        command = (interpreter or sys.executable, "-P", "-m", module, address[0], str(address[1]), str(held))
        try:
            with open(written, "wb", buffering=0) as log:
                self._scratch = Scratch("seer-worker-")
                self._process = ChildProcess(
                    command, environment=_environment(environment), log=log, pass_fds=[held]
                )
        except OSError as error:
            os.close(output)
            return facts | {"flaw": f"{error.filename or 'a process'}: {error.strerror or error}"}
        finally:
            os.close(held)
        pipe = os.fdopen(output, "rb", buffering=0)
        protocol = asyncio.StreamReaderProtocol(self._output)
        await asyncio.get_running_loop().connect_read_pipe(lambda: protocol, pipe)
        self._end = asyncio.create_task(self._ended())
        self._unused.cancel()
        return facts | {"pid": self._process.pid, "scratch": str(self._scratch.path)}

    async def watch(self) -> AsyncIterator[bytes | str]:
        """Yield what the worker writes, and at last how it ended."""
        assert self._end is not None
        while data := await self._output.read(LOG_BYTES):
            yield data
        yield await self._end

    async def hosts_weights(self, cargo: Mapping[str, Any]) -> bool:
        """Return whether weights of the runtime's machine lie in the same place on this one."""
        return await asyncio.to_thread(hosts, convert(cargo, Cargo))

    async def fetch_weights(
        self, key: str, cargo: Mapping[str, Any], address: tuple[str, int], secret: bytes
    ) -> Mapping[str, Any]:
        """Receive weights from the runtime's port ``address``; return the fields of ``Fetched``."""
        fetched = await self._weights.fetch(key, convert(cargo, Cargo), address, secret)
        return {"place": fetched.place, "flaw": fetched.flaw}

    async def free_weights(self, key: str) -> None:
        """Let go of weights."""
        self._weights.free(key)

    async def end(self) -> None:
        """Terminate the worker, then kill it."""
        if self._process is not None:
            await asyncio.to_thread(self._process.end)

    async def _ended(self) -> str:
        """Wait for the worker's end, and kill what it has left running, which has its output open."""
        assert self._process is not None
        assert self._scratch is not None
        await asyncio.to_thread(self._process.wait_unreaped)
        reason = await asyncio.to_thread(self._process.end)
        self._scratch.close()
        asyncio.get_running_loop().call_later(LINGER_S, os._exit, 0)
        return reason


def _environment(given: Mapping[str, str]) -> dict[str, str]:
    """Return the worker's environment: this process's without Ray's part, its devices, and what is given."""
    own = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    # All ranks of an instance are on one node; by its name, gloo asks the DNS for it, 10 s for each group.
    own.setdefault("GLOO_SOCKET_IFNAME", "lo")
    own["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, ray.get_gpu_ids()))
    return own | dict(given)
