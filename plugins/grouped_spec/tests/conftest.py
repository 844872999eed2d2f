"""Real draft servers, clients that note what they are given, and waits that end."""

import asyncio
import time
from collections import defaultdict

import numpy as np
import pytest
import zmq
from seer_grouped_spec.client import DraftClient
from seer_grouped_spec.process import DraftServerProcess
from seer_grouped_spec.wire import Codec, FromServer, StatsAsked

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
        self.remembers = True
        options = {"flush_s": 0.01, "fetch_s": 0.02, "reply_timeout_s": 1.0, **options}
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
        engines.append(Engine(endpoints, **options))
        return engines[-1]

    yield make
    for one in engines:
        one.client.stop()
        assert one.stat("internal_errors") == 0


class Raw:
    """A socket that says to a server what it likes."""

    def __init__(self, endpoint):
        self.context = zmq.Context()
        self.socket = self.context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        self.socket.setsockopt(zmq.RCVTIMEO, int(WAIT_S * 1000))
        self.socket.connect(endpoint)

    def say(self, *frames):
        """Send frames and return the answer."""
        self.socket.send_multipart(frames)
        return Codec(FromServer).decode(self.socket.recv())

    def ask(self, message, key=b""):
        return self.say(Codec.encode(message, key))

    def figures(self, key=b""):
        return self.ask(StatsAsked(1), key).figures


@pytest.fixture
def raw():
    """Return a function that connects a ``Raw`` socket to a server."""
    sockets = []

    def connect(server):
        sockets.append(Raw(getattr(server, "endpoint", server)))
        return sockets[-1]

    yield connect
    for one in sockets:
        one.context.destroy(0)
