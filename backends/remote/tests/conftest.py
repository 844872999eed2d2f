"""Servers that tests share: stand-ins in this process, and real ones of vLLM."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
from seer_remote.fleet import RemoteFleet
from seer_remote.plugin import Settings, seer_make_engines

from seer_core.model import Sampling
from seer_core.plugins.hookspecs import Startup

sys.path.insert(0, str(Path(__file__).parent))

PLAIN = Sampling()


class Thread:
    """An event loop in a thread of its own, where stand-ins serve."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self.loop.run_forever, daemon=True)
        self._thread.start()

    def call(self, work: Any) -> Any:
        future: Future[Any] = asyncio.run_coroutine_threadsafe(work, self.loop)
        return future.result(30)

    def stop(self) -> None:
        self.loop.call_soon_threadsafe(self.loop.stop)
        self._thread.join()
        self.loop.close()


@pytest.fixture
def fake() -> Iterator[Callable[..., Any]]:
    """Return a function that starts a stand-in for ``vllm serve``, changed by attributes."""
    from fake_servers import FakeVllm

    thread = Thread()
    servers: list[Any] = []

    def start(**attributes: Any) -> Any:
        server = FakeVllm()
        for name, value in attributes.items():
            setattr(server, name, value)
        thread.call(server.start())
        server.kill = lambda: thread.call(server.stop())
        server.revive = lambda: thread.call(server.start())
        servers.append(server)
        return server

    yield start
    for server in servers:
        thread.call(server.stop())
    thread.stop()


@pytest.fixture
def fleet_of() -> Callable[..., RemoteFleet]:
    """Return a function that makes the fleet of servers, with settings."""

    def make(
        *servers: Any, base_dir: Path = Path(), sampling: Sampling = PLAIN, **settings: Any
    ) -> RemoteFleet:
        urls = {} if "urls_file" in settings else {"urls": tuple(each.url for each in servers)}
        chosen = Settings(**{"start_timeout_s": 0.0, "poll_s": 0.05, **urls, **settings})
        return seer_make_engines(chosen, Startup(0, base_dir, sampling=sampling))

    return make
