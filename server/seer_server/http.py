"""What all routes share: errors as answers, the token at the door, bodies, clients that go."""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from seer_core.errors import OverloadError, PromptError, SeerError, WeightVersionError
from seer_server.desk import AsleepError, BusyError, GoneError, LentError
from seer_server.protocol import error_body

__all__ = ["LARGEST_BODY", "Refused", "Stream", "check_token", "departure", "read_body", "refusal", "refuse"]

LARGEST_BODY = 64 << 20
"""Bytes of a request; beyond any batch of prompts."""


class Refused(Exception):
    """A request that is answered with an error."""

    def __init__(self, status: int, message: str, headers: Mapping[str, str] | None = None) -> None:
        super().__init__(message)
        self.status, self.headers = status, headers

    @property
    def body(self) -> dict[str, Any]:
        """What is answered."""
        kind = "invalid_request_error" if self.status < 500 else "server_error"
        return error_body(str(self), kind, self.status)


def refusal(error: SeerError, retry_s: int = 1) -> Refused:
    """Return the answer that an error of Seer's is; where there is room again, it is after ``retry_s``."""
    match error:
        case PromptError():
            return Refused(400, str(error))
        case GoneError():
            return Refused(404, str(error))
        case WeightVersionError() | AsleepError() | BusyError():
            return Refused(409, str(error))
        case OverloadError():
            words = "too many responses are unfinished; try again later, or ask for fewer at a time"
            return Refused(429, words, {"Retry-After": str(retry_s)})
        case LentError():
            return Refused(503, str(error), {"Retry-After": "1"})
        case _:
            return Refused(503, str(error))


async def refuse(request: Request, error: Exception) -> Response:
    """Answer with a ``Refused``."""
    assert isinstance(error, Refused)
    return JSONResponse(error.body, error.status, error.headers)


def check_token(request: Request, token: str | None) -> None:
    """Let in only who brings the token, if there is one."""
    if token is None:
        return
    brought = request.headers.get("authorization", "")
    if not hmac.compare_digest(brought.encode(), f"Bearer {token}".encode()):
        raise Refused(401, "bring the server's token: Authorization: Bearer ...")


async def read_body(request: Request) -> bytes:
    """Return a request's body, if it is not too large and the client stays."""
    body = bytearray()
    try:
        async for piece in request.stream():
            body += piece
            if len(body) > LARGEST_BODY:
                raise Refused(
                    413, f"a request may have {LARGEST_BODY:,} bytes; ask for fewer prompts at a time"
                )
    except ClientDisconnect:
        raise Refused(499, "the request was not sent to its end") from None  # nobody reads it
    return bytes(body)


async def departure(request: Request) -> None:
    """Wait until the client has gone; its body was read before."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


class Stream(StreamingResponse):
    """Events until they end or the client goes, and then ``leave``, even if nothing of it was sent."""

    def __init__(
        self,
        events: AsyncIterator[bytes],
        leave: Callable[[], None],
        media_type: str = "text/event-stream",
    ) -> None:
        super().__init__(events, media_type=media_type)
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()
