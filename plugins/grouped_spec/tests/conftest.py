"""Real draft servers, clients that note what they are given, and waits that end."""

import asyncio
import socket
import time
from collections import defaultdict

import numpy as np
import pytest
from seer_grouped_spec.client import DraftClient
from seer_grouped_spec.connection import address_of
from seer_grouped_spec.handshake import GREETING_BYTES, WELCOME_BYTES, Handshake
from seer_grouped_spec.process import DraftServerProcess
from seer_grouped_spec.wire import Codec, Frames, FromServer, StatsAsked

WAIT_S = 10.0


@pytest.fixture
def wait_for():
    """Return a function that waits until a condition holds, and fails with ``what`` if it never does."""

    def wait(condition, what="waited in vain", timeout_s=WAIT_S):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, what
            time.sleep(0.005)

    return wait


@pytest.fixture
def start_server():
    """Return a function that starts a draft server and returns its ``DraftServerProcess``."""
    running = []

    def start(**options):
        running.append(DraftServerProcess(**options))
        asyncio.run(running[-1].start())
        return running[-1]

    yield start
    for one in running:
        asyncio.run(one.stop())


@pytest.fixture
def server(start_server):
    return start_server()


@pytest.fixture(scope="module")
def shared_server():
    """A server for tests that leave nothing behind that matters to each other."""
    one = DraftServerProcess()
    asyncio.run(one.start())
    yield one
    asyncio.run(one.stop())


class Engine:
    """A client with an engine's text: what it wrote itself, and what it was given of others."""

    def __init__(self, endpoints, **options):
        self.texts = defaultdict(lambda: np.empty(0, np.int32))
        self.given = defaultdict(int)
        self.asked = 0
        self.told = []
        self.remembers = True
        options = {"flush_s": 0.01, "fetch_s": 0.02, "reply_timeout_s": 1.0, **options}
        options["tell"] = self.told.append
        self.client = DraftClient(endpoints, deliver=self._deliver, text=self._text, **options)
        self.client.start()

    def join(self, *groups, ttl_s=60.0):
        for group in groups:
            self.client.register_group(group, ttl_s)

    def write(self, group, request, tokens, *, at=None):
        """Write tokens at the end of a request's text, or ``at`` a place; tell the client."""
        tokens = np.asarray(tokens, np.int32)
        have = self.texts[group, request]
        at = len(have) if at is None else at
        self.texts[group, request] = np.concatenate([have[:at], tokens])
        self.client.appended(group, request, at, tokens)

    def text(self, group, request):
        return self.texts[group, request].tolist()

    def stat(self, name):
        return self.client.stats()[name]

    def _deliver(self, group, request, at, tokens):
        have = self.texts[group, request]
        assert at <= len(have), "a gap was delivered"
        self.given[group, request] += len(tokens)
        self.texts[group, request] = np.concatenate([have[:at], tokens])

    def _text(self, group, request, start, stop):
        self.asked += 1
        return self.texts[group, request][start:stop] if self.remembers else None


@pytest.fixture
def engine():
    """Return a function that makes an ``Engine`` for servers, and stops it in the end."""
    engines = []

    def make(*servers, **options):
        endpoints = [getattr(one, "endpoint", one) for one in servers]
        options = {"token": getattr(servers[0], "token", None), **options}
        engines.append(Engine(endpoints, **options))
        return engines[-1]

    yield make
    for one in engines:
        one.client.stop()
        assert one.stat("internal_errors") == 0


class Raw:
    """A socket that has met a server, unless ``token`` is None, and says to it what it likes."""

    def __init__(self, endpoint, token):
        self.socket = socket.create_connection(address_of(endpoint), WAIT_S)
        self._frames = Frames()
        self._greeting = self._take(lambda: self._frames.cut(GREETING_BYTES))
        if token is not None:
            assert self.meet(token)

    def meet(self, token):
        """Say hello and return whether it was welcome, as both sides see it."""
        handshake = Handshake(token.encode())
        self.socket.sendall(handshake.hello(self._greeting))
        welcome = self._take(lambda: self._frames.cut(WELCOME_BYTES))
        if welcome == Handshake.refusal():
            return False
        handshake.welcomed(welcome)
        return True

    def say(self, body):
        """Send a frame and return the answer."""
        self.socket.sendall(len(body).to_bytes(4, "big") + body)
        return Codec(FromServer).decode(self._take(self._frames.next))

    def ask(self, message):
        return self.say(Codec.encode(message)[4:])

    def figures(self):
        return self.ask(StatsAsked(1)).figures

    def is_over(self):
        """Read until the server has closed the connection."""
        try:
            while self.socket.recv(1 << 20):
                pass
        except ConnectionResetError:
            pass
        return True

    def _take(self, cut):
        while (data := cut()) is None:
            received = self.socket.recv(1 << 20)
            assert received, "the server has closed the connection"
            self._frames.add(received)
        return data


@pytest.fixture
def raw():
    """Return a function that connects a ``Raw`` socket to a server, whose token it knows."""
    sockets = []

    def connect(server, **options):
        token = options.get("token", getattr(server, "token", None))
        sockets.append(Raw(getattr(server, "endpoint", server), token))
        return sockets[-1]

    yield connect
    for one in sockets:
        one.socket.close()
