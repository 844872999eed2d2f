"""One draft server as a client sees it: what has been said, what is still to say, and when to start over.

Belongs to the client's thread.  At most one update and one fetch are under way; a server that does not
answer in time is left, and met again later on a new connection with everything restated, so that nothing
needs to be remembered of what was under way.  Text that the server lacks comes from the engine's own copy.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

import attrs
import numpy as np
import structlog
import zmq

from seer_grouped_spec.wire import (
    MAX_GROUPS,
    MAX_ID_BYTES,
    MAX_MESSAGE_BYTES,
    TOKEN_BYTES,
    Append,
    Codec,
    Done,
    Failure,
    Fetch,
    Fetched,
    FromServer,
    Refusal,
    Register,
    Stats,
    ToServer,
    Unregister,
    Update,
    Updated,
    WireError,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Int32 = NDArray[np.int32]
    Deliver = Callable[[str, str, int, Int32], object]
    Text = Callable[[str, str, int, int], Int32 | None]

__all__ = ["Counts", "Link"]

UPDATE_BYTES = 256 << 10
UPDATE_APPENDS = 1024
LEAST_SLICE_BYTES = 4 << 10
INFOS_PER_FETCH = 20_000
BACKOFF_S = (0.2, 5.0)
RETRY_S = 0.05
VAIN_REPAIRS = 3

log = structlog.get_logger("seer.draft_client")


@attrs.define(eq=False)
class Counts:
    """What has happened to a client, over all its servers; plain sums, written by its thread."""

    tokens_sent: int = 0
    tokens_received: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    updates: int = 0
    fetches: int = 0
    refused: int = 0
    gaps: int = 0
    disagreements: int = 0
    gave_up: int = 0
    rejected: int = 0
    dropped_tokens: int = 0
    server_errors: int = 0
    resets: int = 0
    bad_calls: int = 0
    internal_errors: int = 0


@attrs.define(eq=False)
class _Group:
    """A group this client takes part in; ``lapsed``: the server has dropped it; ``mute``: has no room."""

    id: str
    ttl_s: float
    requests: dict[str, _Request] = attrs.field(factory=dict)
    registered: bool = False
    lapsed: bool = False
    mute: bool = False
    leaving: bool = False


@attrs.define(eq=False)
class _Request:
    """A request's text: ``known`` tokens are here, ``sent`` of them are there, as far as we know.

    ``parts`` hold the text from ``start`` to ``known``, while they do: what they lack is asked for.
    ``own``: this engine wrote some of it.  ``mute``: no more is sent; ``deaf``: no more is delivered.
    """

    group: _Group
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


class Link:
    """The conversation with one server."""

    def __init__(
        self,
        endpoint: str,
        context: zmq.Context[zmq.Socket[bytes]],
        poller: zmq.Poller,
        counts: Counts,
        *,
        client: bytes,
        key: bytes,
        deliver: Deliver,
        text: Text,
        reply_timeout_s: float,
        queue_bytes: int,
        now: float,
    ) -> None:
        self.endpoint = endpoint
        self.socket: zmq.Socket[bytes] | None = None
        self.fetched_at = now
        self.unsent_since: float | None = None
        self._context, self._poller, self._counts = context, poller, counts
        self._client, self._key = client, key
        self._deliver, self._text = deliver, text
        self._reply_timeout_s, self._queue_bytes = reply_timeout_s, queue_bytes
        self._codec: Codec[FromServer] = Codec(FromServer)
        self._groups: dict[str, _Group] = {}
        self._joining: dict[str, _Group] = {}
        self._restated: dict[str, _Group] = {}
        self._leaving: dict[str, _Group] = {}
        self._dirty: dict[_Request, None] = {}
        self._held_bytes = 0
        self._awaited: dict[int, tuple[type, float]] = {}
        self._seq = 0
        self._down_until = 0.0
        self._backoff_s = BACKOFF_S[0]
        self._complaint = ""

    # What the engine has said.

    def register(self, group_id: str, ttl_s: float, now: float) -> None:
        """Take part in a group from now on, or for longer."""
        group = self._groups.get(group_id)
        if group is None or group.leaving:
            if group is not None:
                self._forget(group)
            elif not _is_id(group_id):
                self._counts.bad_calls += 1
                return
            group = self._groups[group_id] = self._restated[group_id] = _Group(group_id, ttl_s)
        group.ttl_s = ttl_s
        if group.lapsed:
            self._rejoin(group, now)
        elif not group.mute:
            self._join(group)

    def unregister(self, group_id: str) -> None:
        """Take part in a group no more, once what was written is sent."""
        group = self._groups.get(group_id)
        if group is not None:
            group.leaving = True
            self._leaving[group_id] = group

    def appended(
        self, group_id: str, request_id: str, prev_token_count: int, data: bytes, now: float
    ) -> None:
        """Note what the engine wrote after the first ``prev_token_count`` tokens of a request."""
        group = self._groups.get(group_id)
        if group is None or prev_token_count < 0:
            self._counts.bad_calls += 1
            return
        request = group.requests.get(request_id)
        if request is None:
            if not _is_id(request_id):
                self._counts.bad_calls += 1
                return
            request = group.requests[request_id] = _Request(group, request_id)
        if group.lapsed:
            self._rejoin(group, now)
        end = prev_token_count + len(data) // TOKEN_BYTES
        first, request.own = not request.own, True
        if end <= request.known and not first:
            return
        if end > request.known:
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
        self._soil(request, now)
        if self._held_bytes > self._queue_bytes:
            self._shed()

    # The conversation.

    def tick(self, now: float, *, fetch: bool) -> None:
        """Send what is due."""
        self._talk(now, fetch)
        self.unsent_since = next(iter(self._dirty)).waiting_since if self._dirty else None

    def receive(self, now: float) -> None:
        """Take in every answer that has arrived."""
        while self.socket is not None:
            try:
                frames = self.socket.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            self._counts.bytes_received += sum(map(len, frames))
            try:
                if len(frames) != 1:
                    raise WireError("message", f"an answer of {len(frames)} frames")
                message = self._codec.decode(frames[0])
            except WireError as error:
                self._fail(now, f"it spoke nonsense: {error}")
                continue
            if isinstance(message, Failure):
                if message.seq in self._awaited or message.seq == 0:
                    self._fail(
                        now, f"{message.kind}: {message.reason}", soon=message.kind == "unknown_client"
                    )
                continue
            if self._awaited.pop(message.seq, None) is None:
                self._counts.server_errors += 1
                continue
            self._backoff_s, self._complaint = BACKOFF_S[0], ""
            match message:
                case Updated(_, refused):
                    for refusal in refused:
                        self._refused(refusal, now)
                    if self._dirty:  # what is left of a full message, and repairs
                        self._flush(now)
                case Fetched():
                    self._take(message, now)
                case Done(_, refused):
                    for group_id in refused:
                        self._mute(group_id)
                case Stats():
                    pass

    def reset(self, now: float, why: str) -> None:
        """Leave the server, and meet it later with everything restated."""
        self._counts.resets += 1
        if why != self._complaint:
            log.warning("draft_server_lost", endpoint=self.endpoint, why=why)
        self._complaint = why
        self.close()
        self._down_until = now + self._backoff_s
        self._backoff_s = min(2 * self._backoff_s, BACKOFF_S[1])
        for group in list(self._groups.values()):
            if group.leaving:
                self._forget(group)
            else:
                group.mute = False
                if not group.lapsed:
                    self._rejoin(group, now)

    def close(self) -> None:
        """Close the socket, at once."""
        self._awaited.clear()
        if self.socket is not None:
            with suppress(KeyError):
                self._poller.unregister(self.socket)
            self.socket.close(0)
            self.socket = None

    # How.

    def _talk(self, now: float, fetch: bool) -> None:
        if self.socket is None:
            if now < self._down_until:
                return
            self._open()
        if self._awaited and self._is_late(now):
            self.receive(now)  # this thread may have been kept waiting, not the server
            if self.socket is not None and self._is_late(now):
                self.reset(now, f"no answer in {self._reply_timeout_s:g} s")
        if self.socket is None or now < self._down_until:
            return
        while self._joining:
            some = list(self._joining.values())[:MAX_GROUPS]
            wanted = [(group.id, group.ttl_s) for group in some]
            if not self._send(Register(self._next(), self._client, wanted), now):
                return
            for group in some:
                group.registered = True
                del self._joining[group.id]
        if self._dirty and not self._awaits(Update):
            self._flush(now)
        if self._leaving:
            self._leave(now)
        if fetch and not self._awaits(Fetch) and any(group.registered for group in self._groups.values()):
            self._fetch(now)

    def _open(self) -> None:
        self.socket = socket = self._context.socket(zmq.DEALER)
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.IMMEDIATE, 1)
        socket.setsockopt(zmq.MAXMSGSIZE, MAX_MESSAGE_BYTES)
        socket.setsockopt(zmq.IPV6, int("[" in self.endpoint))
        socket.setsockopt(zmq.RECONNECT_IVL, 100)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, 2000)
        socket.connect(self.endpoint)
        self._poller.register(socket, zmq.POLLIN)

    def _next(self) -> int:
        self._seq += 1
        return self._seq

    def _send(self, message: ToServer, now: float) -> bool:
        """Send a message; False if the server cannot be reached now."""
        if self.socket is None:
            return False
        frame = self._codec.encode(message, self._key)
        try:
            self.socket.send(frame, zmq.NOBLOCK)
        except zmq.Again:
            self._down_until = now + RETRY_S
            return False
        self._awaited[message.seq] = (type(message), now)
        self._counts.bytes_sent += len(frame)
        return True

    def _awaits(self, kind: type) -> bool:
        return any(one is kind for one, _ in self._awaited.values())

    def _is_late(self, now: float) -> bool:
        return any(now - since > self._reply_timeout_s for _, since in self._awaited.values())

    def _fail(self, now: float, why: str, *, soon: bool = False) -> None:
        self._counts.server_errors += 1
        if not soon:
            self._backoff_s = BACKOFF_S[1]
        self.reset(now, why)

    def _join(self, group: _Group) -> None:
        group.lapsed = False
        self._joining[group.id] = group

    def _rejoin(self, group: _Group, now: float) -> None:
        """Register again, tell what is here, and ask whether the server has all that this engine wrote."""
        group.registered = False
        self._join(group)
        self._restated[group.id] = group
        for request in group.requests.values():
            self._release(request)
            request.sent, request.gap_at, request.vain = request.known, -1, 0
            if request.own:
                self._soil(request, now)

    def _forget(self, group: _Group) -> None:
        for request in group.requests.values():
            self._clean(request)
        for table in (self._groups, self._joining, self._restated, self._leaving):
            table.pop(group.id, None)

    def _mute(self, group_id: str) -> None:
        group = self._groups.get(group_id)
        if group is not None and not group.mute:
            group.mute = True
            self._joining.pop(group_id, None)
            for request in group.requests.values():
                self._clean(request)

    def _soil(self, request: _Request, now: float) -> None:
        """Have a request sent with the next update."""
        if request.mute or request.group.mute:
            self._release(request)
        elif request not in self._dirty:
            self._dirty[request] = None
            request.waiting_since = now

    def _clean(self, request: _Request) -> None:
        self._release(request)
        self._dirty.pop(request, None)

    def _release(self, request: _Request) -> None:
        if request.parts:
            self._held_bytes -= sum(map(len, request.parts))
            request.parts.clear()

    def _shed(self) -> None:
        """Let go of the oldest unsent text; it can still be asked for."""
        for request in self._dirty:
            if self._held_bytes <= self._queue_bytes:
                return
            self._counts.dropped_tokens += sum(map(len, request.parts)) // TOKEN_BYTES
            self._release(request)

    def _give_up(self, request: _Request) -> None:
        self._counts.gave_up += 1
        request.mute = True
        self._clean(request)

    def _flush(self, now: float) -> None:
        """Send an update with as much as a message takes."""
        groups: dict[str, list[Append]] = {}
        room, appends, tokens = UPDATE_BYTES, UPDATE_APPENDS, 0
        for request in list(self._dirty):
            if room < LEAST_SLICE_BYTES or not appends:
                break
            if not request.group.registered:
                continue
            data = self._data(request, room)
            if data is None:
                self._give_up(request)
                continue
            groups.setdefault(request.group.id, []).append(Append(request.id, request.sent, data))
            request.sent += len(data) // TOKEN_BYTES
            tokens += len(data) // TOKEN_BYTES
            room -= len(data)
            appends -= 1
            if request.sent >= request.known:
                self._clean(request)
        if groups and self._send(Update(self._next(), self._client, list(groups.items())), now):
            self._counts.updates += 1
            self._counts.tokens_sent += tokens
        elif groups:
            self.reset(now, "cannot be reached")

    def _data(self, request: _Request, room: int) -> bytes | None:
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

    def _leave(self, now: float) -> None:
        """Unregister from groups with nothing left to send."""
        busy = {request.group.id for request in self._dirty}
        gone = [group for id, group in self._leaving.items() if id not in busy or not group.registered]
        del gone[MAX_GROUPS:]
        told = [group.id for group in gone if group.registered]
        if told and not self._send(Unregister(self._next(), self._client, told), now):
            return
        for group in gone:
            self._forget(group)

    def _fetch(self, now: float) -> None:
        infos: dict[str, dict[str, int]] = {}
        room = INFOS_PER_FETCH
        for group in list(self._restated.values()):
            if room <= 0 or len(infos) >= MAX_GROUPS:
                break
            if group.registered:
                infos[group.id] = {request.id: request.known for request in group.requests.values()}
                room -= len(group.requests)
        if self._send(Fetch(self._next(), self._client, infos), now):
            for group_id in infos:
                del self._restated[group_id]

    def _refused(self, refusal: Refusal, now: float) -> None:
        group = self._groups.get(refusal.group_id)
        request = None if group is None else group.requests.get(refusal.request_id)
        if group is None or request is None:
            return
        match refusal.kind:
            case "gap" if refusal.have < request.known:
                self._counts.gaps += 1
                request.vain = request.vain + 1 if refusal.have <= request.gap_at else 0
                request.sent = request.gap_at = refusal.have
                if request.vain >= VAIN_REPAIRS:
                    self._give_up(request)
                else:
                    self._soil(request, now)
                return
            case "unknown_group":
                if group.registered and not group.leaving:
                    self._rejoin(group, now)
                return
            case "disagreement":
                self._counts.disagreements += 1
        self._counts.refused += 1
        if refusal.kind == "evicted":
            self._mute(group.id)
        else:
            self._give_up(request)

    def _take(self, message: Fetched, now: float) -> None:
        counts, deliver = self._counts, self._deliver
        self.fetched_at = now
        counts.fetches += 1
        for group_id, appends in message.groups:
            group = self._groups.get(group_id)
            if group is None or group.leaving:
                continue
            requests = group.requests
            for append in appends:
                request = requests.get(append.request_id)
                if request is None:
                    request = requests[append.request_id] = _Request(group, append.request_id)
                data, known = append.new_tokens, request.known
                skipped = known - append.prev_token_count
                count = len(data) // TOKEN_BYTES - skipped
                if count <= 0 or request.deaf:
                    continue
                if skipped < 0:
                    self._restated[group_id] = group
                    continue
                tokens = np.frombuffer(data, "<i4", count, TOKEN_BYTES * skipped)
                try:
                    deliver(group_id, request.id, known, tokens)
                except Exception as error:
                    counts.rejected += 1
                    request.deaf = True
                    log.warning("draft_text_rejected", group=group_id, request=request.id, error=str(error))
                    continue
                counts.tokens_received += count
                request.known = known + count
                if request.sent < request.known:
                    request.sent = request.known
                if request.own:
                    self._clean(request)
        for group_id in message.dropped:
            group = self._groups.get(group_id)
            if group is not None:
                group.registered, group.lapsed = False, True
        if message.more:
            self._fetch(now)


def _is_id(text: object) -> bool:
    try:
        return isinstance(text, str) and 1 <= len(text.encode()) <= MAX_ID_BYTES
    except UnicodeEncodeError:
        return False
