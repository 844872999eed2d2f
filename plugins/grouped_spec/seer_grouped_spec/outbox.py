"""Text on its way to one draft server: whose, how far it is known here and there, and what goes next.

Text that is not held any more comes from the engine's own copy.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import attrs
import numpy as np

from seer_grouped_spec.connection import Counts
from seer_grouped_spec.wire import TOKEN_BYTES, Append

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    Text = Callable[[str, str, int, int], Int32 | None]

__all__ = ["Group", "Outbox", "Request"]

UPDATE_BYTES = 256 << 10
UPDATE_APPENDS = 1024
LEAST_SLICE_BYTES = 4 << 10


@attrs.define(eq=False)
class Group:
    """A group this client takes part in; ``lapsed``: the server has dropped it; ``mute``: has no room."""

    id: str
    ttl_s: float
    requests: dict[str, Request] = attrs.field(factory=dict)
    registered: bool = False
    lapsed: bool = False
    mute: bool = False
    leaving: bool = False


@attrs.define(eq=False)
class Request:
    """A request's text: ``known`` tokens are here, ``sent`` of them are there, as far as we know.

    ``parts`` hold the text from ``start`` to ``known``, while they do: what they lack is asked for.
    ``own``: this engine wrote some of it.  ``mute``: no more is sent; ``deaf``: no more is delivered.
    """

    group: Group
    id: str
    known: int = 0
    sent: int = 0
    parts: list[bytes] = attrs.field(factory=list)
    start: int = 0
    waiting_since: float = 0.0
    gap_at: int = -1
    vain: int = 0
    own: bool = False
    mute: bool = False
    deaf: bool = False


class Outbox:
    """Requests with something to tell the server, oldest first; at most ``queue_bytes`` of text is held."""

    def __init__(self, text: Text, queue_bytes: int, counts: Counts) -> None:
        self._text, self._queue_bytes, self._counts = text, queue_bytes, counts
        self._waiting: dict[Request, None] = {}
        self._held_bytes = 0

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def __iter__(self) -> Iterator[Request]:
        return iter(self._waiting)

    def append(self, request: Request, prev_token_count: int, data: bytes) -> None:
        """Note text that goes beyond what is known of a request."""
        end = prev_token_count + len(data) // TOKEN_BYTES
        if prev_token_count > request.known:  # from elsewhere, or dropped: the server will tell
            self._release(request)
            if request.sent == request.known:
                request.sent = prev_token_count
        elif prev_token_count < request.known:
            data = data[TOKEN_BYTES * (request.known - prev_token_count) :]
        if data:
            if not request.parts:
                request.start = end - len(data) // TOKEN_BYTES
            request.parts.append(data)
            self._held_bytes += len(data)
        request.known = end

    def put(self, request: Request, now: float) -> None:
        """Have a request sent with the next update."""
        if request.mute or request.group.mute:
            self._release(request)
        elif request not in self._waiting:
            self._waiting[request] = None
            request.waiting_since = now
        if self._held_bytes > self._queue_bytes:
            self._shed()

    def restate(self, request: Request, now: float) -> None:
        """Take it that the server has all; of what this engine wrote, ask whether it does."""
        self._release(request)
        request.sent, request.gap_at, request.vain = request.known, -1, 0
        if request.own:
            self.put(request, now)

    def remove(self, request: Request) -> None:
        """Let go of a request: there is nothing to send of it."""
        self._release(request)
        self._waiting.pop(request, None)

    def give_up(self, request: Request) -> None:
        """Send no more of a request, ever."""
        self._counts.gave_up += 1
        request.mute = True
        self.remove(request)

    def take(self) -> tuple[dict[str, list[Append]], int]:
        """Return appends by group, as many as a message takes, and their tokens; they count as sent."""
        groups: dict[str, list[Append]] = {}
        room, appends, tokens = UPDATE_BYTES, UPDATE_APPENDS, 0
        for request in list(self._waiting):
            if room < LEAST_SLICE_BYTES or not appends:
                break
            if not request.group.registered:
                continue
            data = self._data(request, room)
            if data is None:
                self.give_up(request)
                continue
            groups.setdefault(request.group.id, []).append(Append(request.id, request.sent, data))
            request.sent += len(data) // TOKEN_BYTES
            tokens += len(data) // TOKEN_BYTES
            room -= len(data)
            appends -= 1
            if request.sent >= request.known:
                self.remove(request)
        return groups, tokens

    def _data(self, request: Request, room: int) -> bytes | None:
        """Return the next bytes to send of a request, none if it is a question; None: they are gone."""
        wanted = min(request.known - request.sent, room // TOKEN_BYTES)
        if wanted <= 0:
            return b""
        if request.parts and request.start <= request.sent:
            data = request.parts[0] if len(request.parts) == 1 else b"".join(request.parts)
            skipped = TOKEN_BYTES * (request.sent - request.start)
            if not skipped and len(data) == TOKEN_BYTES * wanted:
                return data
            request.parts[:] = [data]
            return data[skipped : skipped + TOKEN_BYTES * wanted]
        try:
            tokens = self._text(request.group.id, request.id, request.sent, request.sent + wanted)
            if tokens is None or not 0 < len(tokens) <= wanted:
                return None
            return np.asarray(tokens).astype("<i4", casting="safe", copy=False).tobytes()
        except Exception:
            return None

    def _release(self, request: Request) -> None:
        if request.parts:
            self._held_bytes -= sum(map(len, request.parts))
            request.parts.clear()

    def _shed(self) -> None:
        """Let go of the oldest unsent text; it can still be asked for."""
        for request in self._waiting:
            if self._held_bytes <= self._queue_bytes:
                return
            self._counts.dropped_tokens += sum(map(len, request.parts)) // TOKEN_BYTES
            self._release(request)
