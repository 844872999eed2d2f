"""Faults of servers that run already: processes that die, proxies that lie, owners that change them.

Each server is a process, and between it and the driver stands a proxy with TLS, whose certificate a made-up
authority has signed.  Faults come one after the other while rollouts run; each waits until it has struck.
Half of them come while responses run in chunks, and half while they run whole, as they do by default on
servers that share no KV.  Every rollout has to return each response once, with the tokens of a run without
faults.
"""

from __future__ import annotations

import asyncio
import json
import random
import signal
import ssl
import sys
import time
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import accumulate, cycle
from pathlib import Path
from typing import Any, Literal, Protocol
from urllib.parse import urlsplit

import aiohttp
import attrs
from aiohttp import web
from seer_divided_rollout import Settings as DividedSettings
from seer_divided_rollout import seer_make_placer, seer_make_splitter
from seer_host.ports import reserved_port
from seer_host.tables import SeerTable
from seer_remote import fleet as remote_fleet
from seer_remote.instance import RemoteInstance
from seer_remote.plugin import Settings, seer_make_engines
from seer_session import Runtime

from seer_core.model import Completion
from seer_core.model.events import Command, Event
from seer_core.plugins.hookspecs import Startup
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import Policies, Slot
from tests.soak.owner_calls import OwnerCalls
from tests.soak.stand_in_server import StandInProcess
from tests.support.certificates import certify

__all__ = ["ANSWERS", "PROCESSES", "RemoteCampaign"]

PAUSE_S = 0.6
TOKEN = "of-the-campaign"
STRIKE_S = 600.0
"""How long a fault waits for a chunk that it may strike, and for the servers to be back after it."""
UNSTRUCK = 12
"""Rollouts without a chunk for a server in use, after which a fault waits for none."""
REPORT_EVERY = 10
"""Progress is reported after as many faults."""
WAYS: Mapping[str, DividedSettings] = {
    "in chunks": DividedSettings(chunk_tokens=30),
    "whole": DividedSettings(),
}
"""How responses run, and the settings with which they do."""


class StruckServer(Protocol):
    """A server that a campaign may strike."""

    url: str
    calls: OwnerCalls

    def start(self, weights: int = 0) -> None:
        """Start it, with weights of this number."""

    def checkpoint(self, weights: int) -> str:
        """Return the path of weights, to load."""
        ...

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""

    def close(self) -> None:
        """End it."""


@attrs.define(eq=False)
class FaultyProxy:
    """Passes requests on to a server; ``fault`` names what is done to the next chunk, once.

    When the server's process ends, the proxy ends its clients' connections, as the process would.
    """

    server: StruckServer
    tls: ssl.SSLContext
    port: int
    fault: str = ""
    token: str = TOKEN
    """What it wants of its clients."""
    struck: asyncio.Event = attrs.Factory(asyncio.Event)
    _runner: web.AppRunner | None = None
    _client: aiohttp.ClientSession | None = None
    _watching: asyncio.Task[None] | None = None

    @property
    def url(self) -> str:
        """Its address."""
        return f"https://localhost:{self.port}"

    async def start(self, tls: ssl.SSLContext | None = None) -> None:
        """Listen, with another certificate if one is given."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_route("*", "/{path:.*}", self._pass)
        self._client = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0, force_close=True))
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(
            self._runner, "127.0.0.1", self.port, ssl_context=tls or self.tls, reuse_address=True
        )
        await site.start()
        self._watching = asyncio.create_task(self._watch(self._runner))

    async def _watch(self, runner: web.AppRunner) -> None:
        """Hold a connection to the server, and end those of clients when it is made and when it ends."""
        address = urlsplit(self.server.url)
        while True:
            try:
                reader, writer = await asyncio.open_connection(address.hostname, address.port)
            except OSError:
                await asyncio.sleep(0.02)
            else:
                self._end_connections(runner)
                try:
                    with suppress(OSError):
                        await reader.read(1)
                finally:
                    writer.close()
            self._end_connections(runner)

    @staticmethod
    def _end_connections(runner: web.AppRunner) -> None:
        assert runner.server is not None
        for each in list(runner.server.connections):
            if each.transport is not None:
                each.transport.abort()

    async def stop(self) -> None:
        """Close all connections, and listen no more."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._runner is not None:
            await self._runner.cleanup()
            self._runner = None
        if self._client is not None:
            await self._client.close()
            self._client = None

    async def _pass(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        if request.headers.get("Authorization") != f"Bearer {self.token}":
            return web.Response(status=401, text="Unauthorized")
        fault = ""
        if request.path == self.server.calls.generate and self.fault and b'_ids":[1,2,3' in body:
            fault, self.fault = self.fault, ""
            self.struck.set()
        if fault in ("503", "401"):
            return web.Response(status=int(fault), text="made up")
        if fault == "cut" and request.transport is not None:
            request.transport.close()
            return web.Response()
        if fault == "twice":
            await self._forward(request, body)
        try:
            status, answer = await self._forward(request, body)
        except aiohttp.ClientError:
            if request.transport is not None:
                request.transport.close()
            return web.Response()
        if fault == "slow":
            await asyncio.sleep(1.0)
        if fault == "half" and request.transport is not None:
            response = web.StreamResponse(headers={"Content-Length": str(len(answer))})
            await response.prepare(request)
            await response.write(answer[: len(answer) // 2])
            request.transport.close()
            return response
        if fault == "garbage":
            answer = b"\x00" + answer
        elif fault in CHANGED:
            found = json.loads(answer)
            self.server.calls.change(found, fault)
            answer = json.dumps(found).encode()
        return web.Response(status=status, body=answer, content_type="application/json")

    async def _forward(self, request: web.Request, body: bytes) -> tuple[int, bytes]:
        assert self._client is not None
        headers = {"Content-Type": request.headers.get("Content-Type", "application/json")}
        async with self._client.request(
            request.method, f"{self.server.url}{request.path_qs}", data=body, headers=headers
        ) as answer:
            return answer.status, await answer.read()


CHANGED = ("wrong id", "lost token", "more tokens", "bad token", "no choice")
"""What an answer that can be read may have wrong."""
ANSWERS = (
    "503",
    "401",
    "cut",
    "half",
    "twice",
    "slow",
    "garbage",
    *CHANGED,
)
"""What a proxy does to one chunk."""
OWNED = ("weights in mid-chunk", "pause", "sleep", "cache reset")
"""What its owner does to a server."""
PROCESSES = (
    "kill",
    "stop",
    "other weights",
    *OWNED,
    "token",
    "leave",
    "no name",
    "refuse",
    "tls",
)
"""What befalls a server, or its connections."""


class LastEvents:
    """Keeps what was last seen of each instance, for complaints."""

    def __init__(self) -> None:
        self.seen: dict[str, deque[str]] = {}

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Keep an event of an instance, and what was sent to it."""
        for each in (event, *commands):
            if instance := getattr(each, "instance_id", None):
                self.seen.setdefault(instance, deque(maxlen=4)).append(f"{now:.1f} s: {each!r:.160}")


class RemoteCampaign:
    """Faults one after the other, in a random order, while rollouts run."""

    def __init__(
        self,
        folder: Path,
        faults: int,
        seed: int = 1,
        minutes: float = 30,
        engine: Literal["stand-in", "vllm", "sglang"] = "stand-in",
        kinds: Sequence[str] = (*ANSWERS, *PROCESSES),
    ) -> None:
        self.done: Counter[str] = Counter()
        self.ways: dict[str, int] = {}
        """How many faults struck while responses ran in each way."""
        self.complaints: list[str] = []
        self.rollouts = self.responses = self.lost = self.doubled = self.wrong = self.instances_lost = 0
        self.took_s = 0.0
        self._latest = ""
        self._wanted: dict[str, list[int]] = {}
        self._last = LastEvents()
        self.engine = engine
        self._folder, self._faults, self._kinds = folder, faults, kinds
        self._servers = 3 if engine == "stand-in" else 2
        self._until_s = time.monotonic() + 60 * minutes
        self._random = random.Random(seed)
        self._prompts = [
            {
                "group_id": f"g{i}",
                "prompt_token_ids": [1, 2, 3, i + 4],
                "n": 4,
                "max_tokens": 150,
                "seed": i,
                "ignore_eos": True,
            }
            for i in range(8)
        ]

    def row(self) -> dict[str, Any]:
        """Return what came of it."""
        names = (
            "engine",
            "rollouts",
            "responses",
            "lost",
            "doubled",
            "wrong",
            "instances_lost",
            "took_s",
            "complaints",
            "ways",
        )
        found = {name: getattr(self, name) for name in names}
        return {"faults": sum(self.done.values()), "kinds": dict(self.done), **found}

    async def run(self) -> None:
        """Carry it out."""
        began_s = time.monotonic()
        RemoteInstance.most_pause_s = PAUSE_S  # a fault follows on the other
        remote_fleet.LOOK_S = PAUSE_S / 2
        authority, tls, self._other_tls = certify(self._folder)
        self._list = self._folder / "servers.txt"
        self.processes: list[StruckServer] = []
        self.proxies: list[FaultyProxy] = []
        with_ports = ExitStack()
        try:
            for number in range(self._servers):
                self.processes.append(self._process(number, with_ports))
                proxy = FaultyProxy(self.processes[-1], tls, with_ports.enter_context(reserved_port()))
                self.proxies.append(proxy)
                self.processes[-1].start()
                await proxy.start()
            for process in self.processes:
                await self._answers(process)
            self._write(self.proxies)
            token = self._folder / "token"
            token.write_text(TOKEN + "\n")
            settings = Settings(
                urls_file=str(self._list),
                dialect=self.processes[0].calls.dialect,
                ca_file=str(authority),
                token_file=str(token),
                poll_s=0.1,
                silence_timeout_s=20.0,
                connect_timeout_s=15.0,
            )
            await self._play(settings)
        finally:
            for proxy in self.proxies:
                await proxy.stop()
            for process in self.processes:
                process.close()
            with_ports.close()
        self.took_s = time.monotonic() - began_s

    def _process(self, number: int, ports: ExitStack) -> StruckServer:
        if self.engine == "stand-in":
            return StandInProcess(ports.enter_context(reserved_port()))
        from tests.soak.real_servers import SglangProcess, VllmProcess, two_checkpoints

        if not number:
            self._checkpoints = two_checkpoints(self._folder)
        make = VllmProcess if self.engine == "vllm" else SglangProcess
        return make(self._folder / f"server-{number}", self._checkpoints)

    async def _play(self, settings: Settings) -> None:
        calls = self.processes[0].calls
        kinds = [each for each in self._kinds if each not in OWNED or calls.of(each, str)[0]]
        plan = [name for _, name in zip(range(self._faults), cycle(kinds), strict=False)]
        self._random.shuffle(plan)
        for number, (way, divided) in enumerate(WAYS.items()):
            left = len(WAYS) - number
            until_s = time.monotonic() + (self._until_s - time.monotonic()) / left
            faults, plan = plan[: len(plan) // left], plan[len(plan) // left :]
            before = self.done.total()
            await self._play_one_way(settings, divided, faults, until_s)
            self.ways[way] = self.done.total() - before

    async def _play_one_way(
        self, settings: Settings, divided: DividedSettings, faults: Sequence[str], until_s: float
    ) -> None:
        """Carry faults out while responses run by the settings."""
        startup = Startup(0, self._folder)
        fleet = await asyncio.to_thread(seer_make_engines, settings, startup)
        policies = attrs.evolve(
            Policies(),
            splitter=Slot("splitter", "mine", seer_make_splitter(divided, startup)),
            placer=Slot("placer", "mine", seer_make_placer(divided, startup)),
        )
        table = SeerTable(restarts=RestartsTable(attempts=1000, backoff_s=0.1))
        strategies = Strategies(policies).with_observer(self._last)
        async with Runtime(Assembly(fleet, strategies), table) as runtime:
            self._runtime = runtime
            await self._whole("the start")
            wanted = _responses(await runtime.rollout(runtime.groups(self._prompts)).wait())
            self._wanted = self._wanted or wanted
            self._over = False
            rolling = asyncio.create_task(self._roll())
            try:
                for name in faults:
                    if time.monotonic() > until_s or rolling.done():
                        break
                    await self._strike(name)
            finally:
                self._over = True
                await rolling
            await self._whole("the end")

    async def _roll(self) -> None:
        """Roll out again and again, and compare."""
        while not self._over:
            result = await self._runtime.rollout(self._runtime.groups(self._prompts)).wait()
            found = Counter(each.request_id for each in result.completions)
            self.rollouts += 1
            self.responses += len(result.completions)
            self.instances_lost += result.summary.instances_lost
            self.lost += sum(name not in found for name in self._wanted)
            self.doubled += sum(count > 1 for count in found.values())
            for completion in result.completions:
                if completion.finish_reason == "error":
                    self.complaints.append(f"{completion.request_id}: {completion.error}")
                elif list(completion.token_ids) != self._wanted[completion.request_id]:
                    self.wrong += 1
                    self.complaints.append(self._difference(completion))

    def _difference(self, completion: Completion) -> str:
        """Return which server wrote the first token that is not that of a run without faults."""
        wanted = self._wanted[completion.request_id]
        pairs = enumerate(zip(completion.token_ids, wanted, strict=False))
        place = next((place for place, (a, b) in pairs if a != b), len(wanted))
        ends = accumulate(chunk.tokens for chunk in completion.chunks)
        chunk = next((chunk for chunk, end in zip(completion.chunks, ends, strict=True) if place < end), None)
        server = "no server" if chunk is None else chunk.instance
        return f"{completion.request_id} differs from token {place} on, by {server}, after {self._latest!r}"

    async def _strike(self, name: str) -> None:
        number = self._random.randrange(self._servers)
        process, proxy = self.processes[number], self.proxies[number]
        self._latest = f"{name} of {number}"
        if name in ANSWERS:
            proxy.struck.clear()
            proxy.fault = name
            if flaw := await self._unstruck(proxy, f"remote-{number}"):
                self._complain(f"{self._latest} struck no chunk: {flaw}")
                proxy.fault = ""
                return
        else:
            await self._befall(name, process, proxy)
        self.done[name] += 1
        if not (done := self.done.total()) % REPORT_EVERY:
            found = f"{self.rollouts} rollouts, {len(self.complaints)} complaints"
            print(f"{done} of {self._faults} faults: {found}", file=sys.stderr, flush=True)
        if name in PROCESSES:
            await self._whole(name)

    async def _unstruck(self, proxy: FaultyProxy, instance: str) -> str:
        """Wait until a proxy has struck a chunk; return why it struck none."""
        until_s, begun = time.monotonic() + STRIKE_S, self.rollouts
        while not proxy.struck.is_set():
            if instance not in self._runtime.alive:
                begun = self.rollouts
            if self.rollouts - begun > UNSTRUCK:
                return f"{UNSTRUCK} rollouts sent none to {instance}, which is in use"
            if time.monotonic() > until_s:
                return f"none came within {STRIKE_S:g} s"
            with suppress(TimeoutError):
                await asyncio.wait_for(proxy.struck.wait(), 0.1)
        return ""

    def _complain(self, text: str) -> None:
        """Keep a complaint, with what the run holds and the last events of each instance."""
        rollout = self._runtime.current
        waiting = None if rollout is None else list(rollout.unfinished)
        self.complaints.append(
            f"{text}; in use {sorted(self._runtime.alive)}, unfinished {waiting}, last {self._last.seen}"
        )

    async def _befall(self, name: str, process: StruckServer, proxy: FaultyProxy) -> None:
        if name == "stop":
            process.send(signal.SIGSTOP)
            await asyncio.sleep(PAUSE_S)
            process.send(signal.SIGCONT)
        elif name in ("kill", "other weights"):
            process.send(signal.SIGKILL)
            if name == "other weights":
                process.start(weights=5)
                await self._answers(process)
                await asyncio.sleep(PAUSE_S)
                process.send(signal.SIGKILL)
            process.start()
            await self._answers(process)
        elif name in OWNED:
            begin, end = process.calls.of(name, process.checkpoint)
            await self._own(process, begin)
            if end:
                await asyncio.sleep(PAUSE_S)
                await self._own(process, end)
        elif name == "token":
            proxy.token = "another"
            await asyncio.sleep(PAUSE_S)
            proxy.token = TOKEN
        elif name == "leave":
            self._write([each for each in self.proxies if each is not proxy])
            await asyncio.sleep(2 * PAUSE_S)
            self._write(self.proxies)
        elif name == "no name":
            self._write(self.proxies, "https://no-such-host.invalid:1")
            await asyncio.sleep(2 * PAUSE_S)
            self._write(self.proxies)
        else:
            await proxy.stop()
            if name == "tls":
                await proxy.start(self._other_tls)
            await asyncio.sleep(PAUSE_S)
            if name == "tls":
                await proxy.stop()
            await proxy.start()

    async def _whole(self, name: str) -> None:
        """Wait until all servers are in use again."""
        until_s = time.monotonic() + STRIKE_S
        while len(self._runtime.alive) < self._servers:
            if time.monotonic() > until_s:
                alone = sorted(self._runtime.alive)
                self._complain(f"{name}: {alone} alone are in use after {STRIKE_S:g} s")
                until_s += STRIKE_S
                if len(self.complaints) > 20:
                    raise AssertionError(self.complaints)
            await asyncio.sleep(0.05)

    def _write(self, proxies: list[FaultyProxy], *more: str) -> None:
        text = "\n".join([*(each.url for each in proxies), *more])
        self._list.with_suffix(".new").write_text(text + "\n")
        self._list.with_suffix(".new").replace(self._list)

    @staticmethod
    async def _own(process: StruckServer, calls: Sequence[tuple[str, dict[str, Any]]]) -> None:
        async with aiohttp.ClientSession() as client:
            for path, body in calls:
                async with client.post(process.url + path, json=body) as answer:
                    assert answer.status == 200, (path, await answer.text())

    @staticmethod
    async def _answers(process: StruckServer) -> None:
        async with aiohttp.ClientSession() as client:
            while True:
                try:
                    async with client.get(process.url + process.calls.ready) as answer:
                        if answer.status == 200:
                            return
                except aiohttp.ClientError:
                    pass
                await asyncio.sleep(0.05)


def _responses(result: Any) -> dict[str, list[int]]:
    return {each.request_id: list(each.token_ids) for each in result.completions}
