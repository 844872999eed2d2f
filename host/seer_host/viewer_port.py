"""A port for viewers of a run, which goes on as without them however many connect, and however slowly.

One thread accepts connections and reads the heads of their requests; a few others answer the requests whose
heads are whole.  Where more connections are open than may be, the one that has waited longest is closed, so a
new viewer gets in.  Each connection takes one request.
"""

from __future__ import annotations

import io
import re
import resource
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from http.server import BaseHTTPRequestHandler
from queue import SimpleQueue
from typing import Any

import attrs

__all__ = ["ViewerHandler", "ViewerPort", "allow_files"]

MOST_FILES = 65_536
"""Open files that a process allows itself, where the machine does; each connection is one."""

MOST_CONNECTIONS = 256
FILES_PER_CONNECTION = 8
"""Where few files may be open, viewers have an eighth of them at most."""

THREADS = 16
"""Requests that are answered at a time; others wait."""

LONGEST_HEAD = 65_536
"""Bytes of a request before its body."""

HEAD_S = 10.0
"""In which the head of a request has to come."""

BODY_S = 30.0
"""In which the body has to come."""

ANSWER_S = 30.0
"""In which each part of an answer has to be taken."""

LINGER_S = 2.0
"""After an answer, in which the rest of a request is dropped: its sender might lose the answer otherwise."""

PAUSE_S = 0.1
"""Without new connections, after the system has refused one."""

AT_ONCE = 64
"""Connections that are accepted before others are looked at."""

END_OF_HEAD = re.compile(rb"\r?\n\r?\n")


def allow_files() -> int:
    """Raise the number of files that this process may have open, as far as it may; return it."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_FILES)
    if 0 <= soft < most:  # -1: no limit
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most


class ViewerHandler(BaseHTTPRequestHandler):
    """Answers one request; a class that derives from it has a ``do_GET``.  Nothing of a request is logged."""

    protocol_version = "HTTP/1.1"
    server_version = "seer"
    sys_version = ""

    def handle(self) -> None:
        """Answer the request, and no other one on its connection."""
        self.close_connection = True
        try:
            self.handle_one_request()
        except OSError:
            return  # the viewer has gone
        except Exception as error:
            text = f"this request has failed: {type(error).__name__}: {error}".encode("utf-8", "replace")
            self.reply(500, text, {"Content-Type": "text/plain; charset=utf-8"})

    def reply(self, status: int, body: bytes, headers: Mapping[str, str]) -> None:
        """Send an answer, with these headers and those of every answer."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body)), "Connection": "close"}.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Log nothing: viewers are no part of a run's log."""


@attrs.define(eq=False)
class _Connection:
    """A connection that is read: the head of its request so far, or, once it is answered, the rest."""

    socket: socket.socket
    address: Any
    until_s: float
    """When it is closed if no more comes of it."""
    head: bytearray = attrs.field(factory=bytearray)
    answered: bool = False


class ViewerPort:
    """Listens at an address from the start, and answers by ``handler`` from ``start`` to ``close``.

    ``name`` is that of its threads.

    Raises:
        OSError: the address is taken, or is none of this machine.
    """

    def __init__(self, host: str, port: int, handler: type[ViewerHandler], name: str) -> None:
        self._most = max(1, min(MOST_CONNECTIONS, allow_files() // FILES_PER_CONNECTION))
        self._handler, self._name = handler, name
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, _, _, _, address = found[0]
        self._listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._listener.bind(address)
            self._listener.listen(1024)
        except OSError:
            self._listener.close()
            raise
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._reading: set[_Connection] = set()
        self._in_work = 0
        self._ready: SimpleQueue[_Connection | None] = SimpleQueue()
        self._done: deque[_Connection] = deque()
        self._accepts_at_s: float | None = None
        """When connections are accepted again; None while they are."""
        self._closed = self._ended = False
        self._lock = threading.Lock()
        """Held where an answered connection is given back, or is closed because none is taken any more."""
        self._bell, self._ringer = socket.socketpair()
        self._bell.setblocking(False)
        self._ringer.setblocking(False)
        self._reader = threading.Thread(target=self._serve, name=name, daemon=True)

    def start(self) -> ViewerPort:
        """Answer requests from now on."""
        for _ in range(THREADS):
            threading.Thread(target=self._work, name=f"{self._name}-answers", daemon=True).start()
        self._reader.start()
        return self

    def close(self) -> None:
        """Listen no more, and close all connections that are not being answered."""
        self._closed = True
        for _ in range(THREADS):
            self._ready.put(None)
        if self._reader.is_alive():
            self._ring()
            self._reader.join()
        for end in (self._listener, self._bell, self._ringer):
            end.close()

    def _serve(self) -> None:
        """Read the heads of requests until the port is closed."""
        with selectors.DefaultSelector() as self._selector:
            self._selector.register(self._listener, selectors.EVENT_READ)
            self._selector.register(self._bell, selectors.EVENT_READ)
            while not self._closed:
                for key, _ in self._selector.select(self._next_s()):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.fileobj is self._bell:
                        with suppress(BlockingIOError):
                            self._bell.recv(4096)
                    elif key.data in self._reading:
                        self._read(key.data)
                while self._done:
                    self._linger(self._done.popleft())
                self._close_late()
            for connection in list(self._reading):
                self._drop(connection)
        with self._lock:
            self._ended = True
        for connection in self._done:
            connection.socket.close()

    def _next_s(self) -> float | None:
        """Return in how many seconds something is to be done if nothing comes; None for never."""
        times = [each.until_s for each in self._reading]
        if self._accepts_at_s is not None:
            times.append(self._accepts_at_s)
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _accept(self) -> None:
        for _ in range(AT_ONCE):
            try:
                accepted, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionError):
                return
            except OSError:  # the process, or the machine, has no files left: the run needs them more
                self._make_room()
                self._selector.unregister(self._listener)
                self._accepts_at_s = time.monotonic() + PAUSE_S
                return
            if len(self._reading) + self._in_work >= self._most and not self._make_room():
                accepted.close()
                continue
            accepted.setblocking(False)
            connection = _Connection(accepted, address, time.monotonic() + HEAD_S)
            self._watch(connection)
            self._read(connection)

    def _watch(self, connection: _Connection) -> None:
        self._reading.add(connection)
        self._selector.register(connection.socket, selectors.EVENT_READ, connection)

    def _make_room(self) -> bool:
        """Close the connection that is nearest to its end; return whether there was one."""
        if not self._reading:
            return False
        self._drop(min(self._reading, key=lambda each: each.until_s))
        return True

    def _close_late(self) -> None:
        now_s = time.monotonic()
        for connection in [each for each in self._reading if each.until_s <= now_s]:
            self._drop(connection)
        if self._accepts_at_s is not None and self._accepts_at_s <= now_s:
            self._accepts_at_s = None
            self._selector.register(self._listener, selectors.EVENT_READ)

    def _drop(self, connection: _Connection) -> None:
        self._forget(connection)
        connection.socket.close()

    def _forget(self, connection: _Connection) -> None:
        self._reading.remove(connection)
        self._selector.unregister(connection.socket)

    def _read(self, connection: _Connection) -> None:
        """Read what has come, and have the request answered once its head is whole."""
        try:
            data = connection.socket.recv(LONGEST_HEAD)
        except (BlockingIOError, InterruptedError):
            return
        except OSError:
            data = b""
        if not data:
            return self._drop(connection)
        if connection.answered:
            return
        begin = max(0, len(connection.head) - 3)
        connection.head += data
        if END_OF_HEAD.search(connection.head, begin):
            self._forget(connection)
            self._in_work += 1
            self._ready.put(connection)
        elif len(connection.head) > LONGEST_HEAD:
            self._drop(connection)

    def _linger(self, connection: _Connection) -> None:
        """Let the other end read the answer, and close the connection with it or soon after."""
        self._in_work -= 1
        try:
            connection.socket.shutdown(socket.SHUT_WR)
        except OSError:
            return connection.socket.close()
        connection.socket.setblocking(False)
        connection.answered, connection.until_s = True, time.monotonic() + LINGER_S
        self._watch(connection)

    def _work(self) -> None:
        """Answer requests until the port is closed."""
        while (connection := self._ready.get()) is not None:
            if not self._closed:
                with suppress(Exception):  # what a viewer sends, or does not read, is no matter of the run's
                    self._handler(_Begun(connection), connection.address, self)  # type: ignore[arg-type]
            with self._lock:
                if self._ended:
                    connection.socket.close()
                else:
                    self._done.append(connection)
                    self._ring()

    def _ring(self) -> None:
        """Have the reading thread look again."""
        with suppress(OSError):  # it is full, so it will look; or closed
            self._ringer.send(b"\0")


class _Begun(io.RawIOBase):
    """A connection as a handler uses it: what was read of it comes first, and the rest has limits of time."""

    def __init__(self, connection: _Connection) -> None:
        self._socket = connection.socket
        self._head = bytes(connection.head)
        self._until_s = time.monotonic() + BODY_S

    def makefile(self, mode: str, buffering: int = -1) -> io.BufferedReader:
        """Return the request as a file."""
        return io.BufferedReader(self)

    def readable(self) -> bool:
        """Return that this can be read."""
        return True

    def readinto(self, buffer: Any) -> int:
        """Read what is there; raises TimeoutError once the request has taken too long."""
        view = memoryview(buffer).cast("B")
        if self._head:
            size = min(len(view), len(self._head))
            view[:size], self._head = self._head[:size], self._head[size:]
            return size
        left_s = self._until_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the request was not sent in time")
        self._socket.settimeout(left_s)
        return self._socket.recv_into(view)

    def sendall(self, data: Any) -> None:
        """Send a part of the answer; raises TimeoutError if the other end does not read it in time."""
        self._socket.settimeout(ANSWER_S)
        self._socket.sendall(data)
