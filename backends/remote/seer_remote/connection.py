"""HTTP to one server: kept connections, time limits, and errors as sentences."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, NoReturn
from urllib.parse import urlsplit

import aiohttp
import attrs
import msgspec

__all__ = ["UNAUTHORIZED", "Connection", "HeldConnection", "Malformed", "RefusedCall", "Unreachable"]

KEEP_S = 3.0
"""How long an idle connection is kept: less than the 5 s after which uvicorn closes it."""

LONGEST_QUOTE = 300
"""Characters of an answer that an error quotes."""

PORTS = {"http": 80, "https": 443}

JSON = "application/json"

UNAUTHORIZED = 401

CA_FILE = "ca_file of [engine.remote]"

MOST_BYTES = 1 << 30
"""Of an answer: more is none to a chunk."""


AT_ONCE = 64
"""Connections for chunks that are made to a server at a time.  Thousands at once keep a driver so busy that
each seems to take too long, and a server's own queue of connections is short."""


class Unreachable(Exception):
    """The server has not answered, or not to the end."""


class RefusedCall(Exception):
    """The server has answered with an error; ``status`` is HTTP's."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(f"it answered {status}: {' '.join(text.split())[:LONGEST_QUOTE] or 'nothing'}")
        self.status = status
        self.text = text


class Malformed(Exception):
    """The server's answer is none to what it was asked."""


class PatientConnector(aiohttp.TCPConnector):
    """Makes few connections at a time for requests without a time limit, which are those for chunks."""

    def __init__(self, trusted: ssl.SSLContext | bool) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_S, ssl=trusted)
        self._turns = asyncio.Semaphore(AT_ONCE)

    async def connect(
        self, req: aiohttp.ClientRequest, traces: list[Any], timeout: aiohttp.ClientTimeout
    ) -> Any:
        """Return a connection; the wait for its turn does not count as its making."""
        if timeout.total is not None:
            return await super().connect(req, traces, timeout)
        async with self._turns:
            return await super().connect(req, traces, timeout)


class HeldConnection:
    """A connection on which nothing is sent.

    It ends with the server's process, and before another can listen at the same address.  So while it lasts,
    an answer on any connection is of the process to which this one was made.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self.ended = asyncio.ensure_future(self._wait(reader))
        """Done when it has ended, also by ``close``."""

    async def _wait(self, reader: asyncio.StreamReader) -> None:
        with suppress(OSError):
            await reader.read(1)

    def close(self) -> None:
        """End it; idempotent."""
        self.ended.cancel()
        self._writer.close()


@attrs.define(eq=False)
class Connection:
    """One server's address, and its connections while they are open.

    ``token`` is sent as a bearer's if it is not empty; ``ca_file`` names certificates to trust instead of the
    system's.
    """

    url: str
    token: str = ""
    ca_file: str = ""
    connect_timeout_s: float = 10.0
    _session: aiohttp.ClientSession | None = None
    _trusted: ssl.SSLContext | None = None

    def open(self) -> None:
        """Make room for connections; a loop must run."""
        if self._session is not None:
            return
        if self._trusted is None and self.url.startswith("https:"):
            self._trusted = ssl.create_default_context(cafile=self.ca_file or None)
        self._session = aiohttp.ClientSession(
            headers={"Authorization": f"Bearer {self.token}"} if self.token else {},
            connector=PatientConnector(self._trusted or True),
        )

    async def close(self) -> None:
        """End all connections; idempotent."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()
            await asyncio.sleep(0)  # its sockets close in the loop's next turn

    async def hold(self) -> HeldConnection | None:
        """Open a connection on which nothing is sent; None where the address is none of HTTP.

        Raises:
            Unreachable: the server takes none.
        """
        parts = urlsplit(self.url)
        if parts.scheme not in PORTS:
            return None
        try:
            async with asyncio.timeout(self.connect_timeout_s):
                port = parts.port or PORTS[parts.scheme]
                streams = await asyncio.open_connection(parts.hostname, port, ssl=self._trusted)
        except (OSError, TimeoutError) as error:
            raise Unreachable(_described(error)) from error
        return HeldConnection(*streams)

    async def get(self, path: str, limit_s: float = 10.0) -> bytes:
        """Return the body of an answer; raises as ``post``."""
        return await self._ask("GET", path, None, limit_s)

    async def post(self, path: str, body: Any = None, limit_s: float | None = 60.0) -> bytes:
        """Send JSON and return the body of the answer; without a limit it may take for ever.

        Raises:
            Unreachable: there was no answer, or half of one.
            RefusedCall: its status is an error's.
        """
        return await self._ask("POST", path, msgspec.json.encode(body), limit_s)

    async def relay(
        self, method: str, path: str, body: bytes | None, kind: str = JSON, limit_s: float | None = None
    ) -> tuple[int, str, bytes]:
        """Send a body of a ``kind``; return status, kind and body of the answer, an error's too.

        Raises:
            Unreachable: there was no answer, or half of one.
            Malformed: the answer is too large to be one.
        """
        if self._session is None:
            raise Unreachable("the connection is closed")
        timeout = aiohttp.ClientTimeout(total=limit_s, sock_connect=self.connect_timeout_s)
        headers = {} if body is None else {"Content-Type": kind}
        try:
            async with self._session.request(
                method,
                self.url + path,
                data=body,
                headers=headers,
                timeout=timeout,
                allow_redirects=False,
            ) as answer:
                if (answer.content_length or 0) > MOST_BYTES:
                    raise Malformed(f"it answers {path} with {answer.content_length:,} bytes")
                return answer.status, answer.content_type, await answer.read()
        except TimeoutError as error:
            raise Unreachable(
                f"no answer to {path} within {limit_s or self.connect_timeout_s:g} s"
            ) from error
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(f"{path}: {_described(error)}") from error

    @asynccontextmanager
    async def opened(
        self, method: str, path: str, body: bytes | None, kind: str
    ) -> AsyncIterator[tuple[int, str, AsyncIterator[bytes]]]:
        """Send a body; yield status, kind and pieces of the answer as they come.

        Raises:
            Unreachable: there was no answer, or half of one.
        """
        if self._session is None:
            raise Unreachable("the connection is closed")
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=self.connect_timeout_s)
        headers = {} if body is None else {"Content-Type": kind}
        try:
            async with self._session.request(
                method, self.url + path, data=body, headers=headers, timeout=timeout, allow_redirects=False
            ) as answer:
                kind = answer.headers.get("Content-Type", "application/octet-stream")
                yield answer.status, kind, answer.content.iter_any()
        except (aiohttp.ClientError, OSError, ValueError) as error:
            raise Unreachable(f"{path}: {_described(error)}") from error

    async def _ask(self, method: str, path: str, body: bytes | None, limit_s: float | None) -> bytes:
        status, _, found = await self.relay(method, path, body, limit_s=limit_s)
        if status != 200:
            self._refuse(status, found)
        return found

    def _refuse(self, status: int, body: bytes) -> NoReturn:
        text = body.decode("utf-8", "replace")
        if status == UNAUTHORIZED:
            text = "it wants a token: name it"
            if self.token:
                text = "it refuses the token that it was given: name its own"
            text += " in token_env or token_file of [engine.remote]"
        raise RefusedCall(status, text)


def _described(error: BaseException) -> str:
    """Return an error in words; several of aiohttp's have none."""
    if isinstance(error, aiohttp.ClientConnectorCertificateError):
        reason = error.certificate_error
        return f"its certificate is not trusted here ({reason}): name its authority's in {CA_FILE}"
    if isinstance(error, aiohttp.ClientConnectorSSLError):
        return f"it does not speak TLS, or not as here ({error.os_error}): where it does not, write http://"
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
