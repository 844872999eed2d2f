"""Routers over real servers: slime's own where it is installed, else a stand-in with what is used of it."""

from __future__ import annotations

import importlib.util
import json
import sys
import urllib.request
from collections.abc import Sequence
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp
from aiohttp import web
from seer_host.ports import reserved_port
from sglang_standin import StandInServers

from tests.soak.real_servers import server_processes
from tests.support.eventually import eventually

__all__ = ["router_over"]


class StandInRouter(StandInServers):
    """Lists servers, and sends each of them a request in turn."""

    def __init__(self, urls: Sequence[str]) -> None:
        super().__init__(0)
        self.urls = list(urls)

    def _router(self) -> list[Any]:
        turns = count()

        async def workers(_: web.Request) -> web.Response:
            return web.json_response({"workers": [{"url": each} for each in self.urls]})

        async def generate(request: web.Request) -> web.Response:
            url = f"{self.urls[next(turns) % len(self.urls)]}/generate"
            body = await request.json()
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout()) as session,
                session.post(url, json=body) as answer,
            ):
                return web.json_response(await answer.json(), status=answer.status)

        return [web.get("/workers", workers), web.post("/generate", generate)]


class SlimeRouter:
    """The router that slime starts, in a process of its own; servers are registered as slime does it."""

    def __init__(self, urls: Sequence[str], log: Path) -> None:
        with reserved_port() as port:
            command = [sys.executable, "-m", "sglang_router.launch_router", "--policy", "round_robin"]
            command += ["--prometheus-port", str(port)]
            self._process = server_processes.ServerProcess(command, {}, log, "/workers")
            self.router: str = self._process.url
            self._process.start()
            self._process.await_ready()
        for url in urls:
            self._process.call("/workers", {"url": url, "worker_type": "regular"})
        eventually(lambda: self._listed() == set(urls), "the router lists its servers", logs=[log])

    def _listed(self) -> set[str]:
        with urllib.request.urlopen(f"{self.router}/workers") as answer:
            return {each["url"] for each in json.load(answer)["workers"] if each["is_healthy"]}

    def close(self) -> None:
        """End it."""
        self._process.close()


def router_over(urls: Sequence[str], log: Path) -> StandInRouter | SlimeRouter:
    """Return a router over these servers; its address is ``router``."""
    if importlib.util.find_spec("sglang_router") is None:
        return StandInRouter(urls)
    return SlimeRouter(urls, log)
