"""Shared by all routes: errors as answers, who may ask, bodies, disconnects."""

from __future__ import annotations

import asyncio
import base64
import hmac
import ipaddress
import re
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from functools import wraps
from typing import Any, TypeVar
from urllib.parse import urlsplit

import msgspec
from seer_host.sampling_fields import SamplingChoice
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Receive, Scope, Send

from seer_core.errors import (
    QUOTED,
    ConfigError,
    OverloadError,
    PromptError,
    SeerError,
    WeightVersionError,
    printable,
)
from seer_server.broker import AsleepError, BusyError, BusyUpdatingError, GoneError
from seer_server.protocol import LONGEST_FAULT, error_body
from seer_server.unsupported_fields import FieldError

__all__ = [
    "REFUSALS",
    "Door",
    "Refused",
    "Stream",
    "by_names",
    "from_this_machine",
    "is_loopback",
    "pieces",
    "read_body",
    "read_json",
    "refusal",
    "unless_disconnected",
]

T = TypeVar("T")

Handler = Callable[[Request], Awaitable[Response]]

LARGEST_BODY = 64 << 20
"""Bytes of a request; beyond any batch of prompts."""

STALLED_S = 600.0
"""After so long without a byte a body is refused; a client on a busy machine has time to send it."""

JSON = "application/json"

PROMPT_NUMBER = re.compile(r"^prompt \d+: ")
"""What ``make_groups`` writes before the reason."""

WORD = re.compile(r"""(?<!\w)'(?:[^'\\]|\\.)*'|"(?:[^"\\]|\\.)*"|[\w.]*\w""")
"""A word of a message, or what it quotes."""

OF_RECORDS = ("n", "max_tokens", "seed", "timeout_s", "group_id")
"""Further fields with which errors of a prompt begin."""

LONGEST_MESSAGE = 1000
"""Characters of an error."""


class Refused(Exception):
    """A request that is answered with an error; ``field`` names the field at fault, if it is one."""

    def __init__(
        self,
        status: int,
        message: str,
        headers: Mapping[str, str] | None = None,
        field: str | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.headers, self.field = status, headers, field

    @property
    def body(self) -> dict[str, Any]:
        """The body of the answer."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_body(printable(str(self), LONGEST_MESSAGE), kind, self.status, self.field)


def field_of(message: str) -> str | None:
    """Return the field that an error of a prompt begins with, if it is one."""
    word = PROMPT_NUMBER.sub("", message).partition(" ")[0].rstrip(":")
    if word in ("message", "messages"):
        return "messages"
    return word if word in (*SamplingChoice.__struct_fields__, *OF_RECORDS) else None


def by_names(error: PromptError, names: Mapping[str, str]) -> FieldError:
    """Return an error of completions for a request that has other names for some of the fields."""
    field = error.field if isinstance(error, FieldError) else field_of(str(error))
    words = WORD.sub(lambda found: names.get(found[0], found[0]), str(error))
    return FieldError(words, field and names.get(field, field))


def refusal(error: SeerError, retry_s: int = 1) -> Refused:
    """Return the answer for an error of Seer's; at an overload, to be repeated after ``retry_s`` seconds."""
    match error:
        case FieldError():
            return Refused(400, str(error), field=error.field)
        case PromptError() | ConfigError():  # the default max_tokens is beyond the model
            return Refused(400, str(error), field=field_of(str(error)))
        case GoneError():
            return Refused(404, str(error))
        case WeightVersionError() | AsleepError() | BusyError():
            return Refused(409, str(error))
        case OverloadError():
            words = "too many responses are unfinished; try again later, or ask for fewer at a time"
            return Refused(429, words, {"Retry-After": str(retry_s)})
        case BusyUpdatingError():
            return Refused(503, str(error), {"Retry-After": "1"})
        case _:
            return Refused(503, str(error))


async def _refuse(request: Request, error: Exception) -> Response:
    path = printable(str(request.scope["path"]), QUOTED)  # the whole address may be none
    match error:
        case Refused():
            answer = error
        case SeerError():
            answer = refusal(error, request.app.state.broker.retry_s(1))
        case HTTPException(status_code=status):
            words = {
                404: f"there is nothing at {path}",
                405: f"{path} takes no {printable(request.method, QUOTED)}",
            }
            answer = Refused(status, words.get(status, error.detail), error.headers)
        case _:
            answer = Refused(500, "the server has failed at this request; look into its log, and report it")
    return JSONResponse(answer.body, answer.status, answer.headers)


REFUSALS = dict.fromkeys((Refused, SeerError, HTTPException, Exception), _refuse)
"""How errors are answered, in an application whose ``state`` has the ``broker``."""


class Door:
    """Refuses requests without the token before anything else of them is read.

    Args:
        app: answers the others.
        token: the token; None where none is needed.
        open_routes: the routes that need none.
    """

    def __init__(self, app: ASGIApp, token: str | None, open_routes: Sequence[BaseRoute]) -> None:
        self._app, self._token, self._open_routes = app, token, open_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request, or refuse it."""
        if scope["type"] == "http" and not (self._brings_token(scope) or self._is_open(scope)):
            words = "bring the server's token, in the file that it named at its start"
            refused = Refused(401, f"{words}: Authorization: Bearer ...", {"WWW-Authenticate": "Bearer"})
            await JSONResponse(refused.body, refused.status, refused.headers)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _brings_token(self, scope: Scope) -> bool:
        if self._token is None:
            return True
        headers = dict(reversed(scope["headers"]))  # the first of each name
        scheme, _, value = headers.get(b"authorization", b"").partition(b" ")
        value = value.strip()
        if scheme.lower() == b"basic" and b"origin" not in headers:  # which browsers would send by themselves
            try:
                value = base64.b64decode(value, validate=True).partition(b":")[2]
            except ValueError:
                return False
        elif scheme.lower() != b"bearer":
            return False
        return hmac.compare_digest(value, self._token.encode())

    def _is_open(self, scope: Scope) -> bool:
        return any(route.matches(scope)[0] != Match.NONE for route in self._open_routes)


def from_this_machine(handler: Handler) -> Handler:
    """Return a handler that refuses requests which a web page from elsewhere may have made."""

    @wraps(handler)
    async def checked(request: Request) -> Response:
        _require_loopback(request)
        return await handler(request)

    return checked


def _require_loopback(request: Request) -> None:
    """Refuse what a browser on this machine sends for a page from elsewhere, also after DNS rebinding."""
    for name in ("host", "origin"):
        value = request.headers.get(name)
        if value is not None and not _names_loopback(value):
            raise Refused(
                403,
                f"the {name.capitalize()} of the request is {printable(value, QUOTED)}, and what"
                " needs no token is answered to and from localhost alone; bring the token",
            )


def _names_loopback(place: str) -> bool:
    try:
        return is_loopback(urlsplit(place if "//" in place else f"//{place}").hostname or "")
    except ValueError:
        return False


def is_loopback(host: str) -> bool:
    """Return whether a name or an address stands for this machine alone."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


async def read_body(request: Request) -> bytes:
    """Return a request's body of JSON, if it is not too large, and the client stays and goes on."""
    body = bytearray()
    try:
        async for piece in pieces(request):
            body += piece
            if len(body) > LARGEST_BODY:
                raise Refused(
                    413, f"a request may have {LARGEST_BODY:,} bytes; ask for fewer prompts at a time"
                )
    except ClientDisconnect:
        raise Refused(499, "the request was not sent to its end") from None
    # A browser lets any page send other types to this machine without asking the user.
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != JSON:
        raise Refused(415, f"the body must be JSON; send the header Content-Type: {JSON}")
    return bytes(body)


async def pieces(request: Request) -> AsyncIterator[bytes]:
    """Yield a request's body as it comes, if the client goes on sending."""
    stream = aiter(request.stream())
    while True:
        try:
            async with asyncio.timeout(STALLED_S):
                piece = await anext(stream, None)
        except TimeoutError:
            words = f"nothing more of the body came for {STALLED_S:g} s; send all of it"
            raise Refused(408, words, {"Connection": "close"}) from None
        if piece is None:
            return
        yield piece


async def read_json(request: Request, kind: type[T]) -> T:
    """Return a request's body, which is of this kind; an empty one is an empty object.

    Raises:
        PromptError: it is none.
    """
    body = await read_body(request)
    try:
        return msgspec.json.decode(body or b"{}", type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(printable(f"the body does not fit: {error}", LONGEST_FAULT)) from None


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """Return what ``work`` returns, or cancel it if the client, whose body was read, disconnects before."""
    working = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise Refused(499, "the client has gone")
        return working.result()
    finally:
        gone.cancel()
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)


async def _disconnected(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(StreamingResponse):
    """Sends events until they end or the client disconnects, and then calls ``leave`` in any case."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        leave: Callable[[], None],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(events, media_type=media_type)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the events, then call ``leave``."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
