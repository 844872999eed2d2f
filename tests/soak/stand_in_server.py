"""A stand-in for ``vllm serve`` in a process of its own, which a fork server starts at once."""

from __future__ import annotations

import asyncio
import importlib
import multiprocessing
import os
import signal
import sys
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from aiohttp import web

from tests.soak.owner_calls import VllmCalls

__all__ = ["StandInProcess"]

FOLDER = str(Path(__file__).parents[2] / "backends" / "remote" / "tests")
if FOLDER not in sys.path:
    sys.path.insert(0, FOLDER)
fake_servers: Any = importlib.import_module("fake_servers")


class OwnedStandIn(fake_servers.FakeVllm):  # type: ignore[misc]
    """One at a port of its own, which its owner may pause and put to sleep.

    As in vLLM, both end what runs, and what comes then waits.
    """

    def __init__(self, port: int, weights: int) -> None:
        super().__init__()
        self.release()
        self._port = port
        self.weights, self.token_s = weights, 0.005

    @web.middleware
    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        match request.path:
            case "/pause" | "/sleep":
                self.paused = True
                self.aborted |= self.running
            case "/resume" | "/wake_up":
                self.paused = False
            case "/reset_prefix_cache":
                self.store.clear()
            case _:
                response: web.StreamResponse = await super()._guard(request, handler)
                return response
        return web.json_response({})

    async def _write(self, name: str, body: Any, context: list[int], how: Any) -> Any:
        self.running.add(name)
        try:
            while self.paused:
                await asyncio.sleep(0.02)
                if name in self.aborted:
                    body["cached"], body["labels"] = 0, []
                    return [], [], "abort"
        finally:
            self.running.discard(name)
            self.aborted.discard(name)
        return await super()._write(name, body, context, how)


async def _serve(port: int, weights: int) -> None:
    await OwnedStandIn(port, weights).start()
    await asyncio.Event().wait()


def _run(port: int, weights: int) -> None:
    asyncio.run(_serve(port, weights))


class StandInProcess:
    """A server whose weights are a number; ``start`` again after a kill."""

    calls = VllmCalls()

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self._port = port
        self._process: BaseProcess | None = None

    def start(self, weights: int = 0) -> None:
        """Start it with these weights."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._process = context.Process(target=_run, args=(self._port, weights), daemon=True)
        self._process.start()

    def checkpoint(self, weights: int) -> str:
        """Return the name of weights: its length is their number."""
        return "x" * weights

    def send(self, number: signal.Signals) -> None:
        """Send it a signal; after a kill it is gone."""
        assert self._process is not None
        assert self._process.pid is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.join()

    def close(self) -> None:
        """End it."""
        if self._process is not None and self._process.is_alive():
            self.send(signal.SIGCONT)
            self.send(signal.SIGKILL)
