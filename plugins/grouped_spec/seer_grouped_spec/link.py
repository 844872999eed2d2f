"""One draft server as a client sees it: what has been said, what is still to say, and when to start over.

Belongs to the client's thread.  At most one update and one fetch are under way; a server that does not
answer in time is left, and met again later on a new connection with everything restated, so that nothing
needs to be remembered of what was under way.  Text that the server lacks comes from the engine's own copy.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import structlog

from seer_grouped_spec.connection import Connection, Counts, Lost
from seer_grouped_spec.outbox import Group, Outbox, Request
from seer_grouped_spec.wire import (
    MAX_GROUPS,
    MAX_ID_BYTES,
    TOKEN_BYTES,
    Done,
    Failure,
    Fetch,
    Fetched,
    Refusal,
    Register,
    Stats,
    Unregister,
    Update,
    Updated,
)

if TYPE_CHECKING:
    import socket

    from numpy.typing import NDArray

    from seer_grouped_spec.outbox import Text

    Int32 = NDArray[np.int32]
    Deliver = Callable[[str, str, int, Int32], object]

__all__ = ["Link"]

INFOS_PER_FETCH = 20_000
VAIN_REPAIRS = 3
AWAY_S = 5.0
"""A server that is away for longer is told of."""

log = structlog.get_logger("seer.draft_client")


class Link:
    """The conversation with one server."""

    def __init__(
        self,
        endpoint: str,
        counts: Counts,
        *,
        token: bytes,
        deliver: Deliver,
        text: Text,
        tell: Callable[[str], None],
        reply_timeout_s: float,
        queue_bytes: int,
        now: float,
    ) -> None:
        self.fetched_at = now
        self.unsent_since: float | None = None
        self._counts, self._deliver, self._tell = counts, deliver, tell
        self._told: set[str] = set()
        self._why_away = "it does not answer"
        self._connection = Connection(endpoint, counts, token=token, reply_timeout_s=reply_timeout_s, now=now)
        self._outbox = Outbox(text, queue_bytes, counts)
        self._groups: dict[str, Group] = {}
        self._joining: dict[str, Group] = {}
        self._restated: dict[str, Group] = {}
        self._leaving: dict[str, Group] = {}

    @property
    def socket(self) -> socket.socket | None:
        """The socket to poll, while there is a connection."""
        return self._connection.socket

    @property
    def events(self) -> int:
        """What to poll it for."""
        return self._connection.events

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
            group = self._groups[group_id] = self._restated[group_id] = Group(group_id, ttl_s)
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
            request = group.requests[request_id] = Request(group, request_id)
        if group.lapsed:
            self._rejoin(group, now)
        end = prev_token_count + len(data) // TOKEN_BYTES
        first, request.own = not request.own, True
        if end <= request.known and not first:
            return
        if end > request.known:
            self._outbox.append(request, prev_token_count, data)
        self._outbox.put(request, now)

    # The conversation.

    def tick(self, now: float, *, fetch: bool) -> None:
        """Send what is due."""
        try:
            self._talk(now, fetch)
        except Lost as error:
            self._lost(now, error)
        away_since = self._connection.away_since
        if away_since is None:
            self._told.discard("away")
        elif now - away_since > AWAY_S:
            self._tell_once("away", self._why_away)
        oldest = next(iter(self._outbox), None)
        self.unsent_since = None if oldest is None else oldest.waiting_since

    def receive(self, now: float) -> None:
        """Take in every answer that has arrived."""
        while True:
            try:
                message = self._connection.receive(now)
            except Lost as error:
                self._lost(now, error)
                return
            if message is None:
                return
            if isinstance(message, Failure):
                self._lost(now, Lost(f"{message.kind}: {message.reason}", lasting=True))
                return
            if not self._connection.answered(message.seq):
                self._counts.server_errors += 1
                continue
            match message:
                case Updated(_, refused):
                    for refusal in refused:
                        self._refused(refusal, now)
                    if self._outbox:  # what is left of a full message, and repairs
                        self._flush(now)
                case Fetched():
                    self._take(message, now)
                case Done(_, refused):
                    for group_id in refused:
                        self._mute(group_id)
                case Stats():
                    pass

    def reset(self, now: float, why: str, *, lasting: bool = False) -> None:
        """Leave the server, and meet it later with everything restated."""
        had_met = self._connection.away_since is None
        self._why_away = why
        self._connection.lose(now, why, lasting=lasting)
        if not had_met:
            return
        for group in list(self._groups.values()):
            if group.leaving:
                self._forget(group)
            else:
                group.mute = False
                if not group.lapsed:
                    self._rejoin(group, now)

    def close(self) -> None:
        """Close the socket, at once."""
        self._connection.close()

    # How.

    def _talk(self, now: float, fetch: bool) -> None:
        connection = self._connection
        if connection.is_late(now):
            self.receive(now)  # this thread may have been kept waiting, not the server
            if connection.is_late(now):
                self.reset(now, f"no answer in {connection.reply_timeout_s:g} s")
        if not connection.ready(now):
            return
        while self._joining:
            some = list(self._joining.values())[:MAX_GROUPS]
            wanted = [(group.id, group.ttl_s) for group in some]
            if not self._connection.send(Register(self._connection.next_seq(), wanted), now):
                return
            for group in some:
                group.registered = True
                del self._joining[group.id]
        if self._outbox and not connection.awaits(Update):
            self._flush(now)
        if self._leaving:
            self._leave(now)
        if (
            fetch
            and not connection.awaits(Fetch)
            and any(group.registered for group in self._groups.values())
        ):
            self._fetch(now)

    def _lost(self, now: float, error: Lost) -> None:
        if error.lasting:
            self._counts.server_errors += 1
            self._tell_once("away", str(error))
        self.reset(now, str(error), lasting=error.lasting)

    def _tell_once(self, kind: str, why: str) -> None:
        """Tell, at most once of each kind; of an absence once each time."""
        if kind not in self._told:
            self._told.add(kind)
            self._tell(f"draft server {self._connection.endpoint}: {why}")

    def _join(self, group: Group) -> None:
        group.lapsed = False
        self._joining[group.id] = group

    def _rejoin(self, group: Group, now: float) -> None:
        """Register again, tell what is here, and ask whether the server has all that this engine wrote."""
        group.registered = False
        self._join(group)
        self._restated[group.id] = group
        for request in group.requests.values():
            self._outbox.restate(request, now)

    def _forget(self, group: Group) -> None:
        for request in group.requests.values():
            self._outbox.remove(request)
        for table in (self._groups, self._joining, self._restated, self._leaving):
            table.pop(group.id, None)

    def _mute(self, group_id: str) -> None:
        group = self._groups.get(group_id)
        if group is not None and not group.mute:
            self._tell_once("full", "it has no room for all groups, so some are not shared")
            group.mute = True
            self._joining.pop(group_id, None)
            for request in group.requests.values():
                self._outbox.remove(request)

    def _flush(self, now: float) -> None:
        """Send an update with as much as a message takes."""
        groups, tokens = self._outbox.take()
        if not groups:
            return
        update = Update.of(self._connection.next_seq(), groups.items())
        if self._connection.send(update, now):
            self._counts.updates += 1
            self._counts.tokens_sent += tokens
        else:
            self.reset(now, "it does not read what it is sent")

    def _leave(self, now: float) -> None:
        """Unregister from groups with nothing left to send."""
        busy = {request.group.id for request in self._outbox}
        gone = [group for id, group in self._leaving.items() if id not in busy or not group.registered]
        del gone[MAX_GROUPS:]
        told = [group.id for group in gone if group.registered]
        if told and not self._connection.send(Unregister(self._connection.next_seq(), told), now):
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
        if self._connection.send(Fetch.of(self._connection.next_seq(), infos), now):
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
                    self._outbox.give_up(request)
                else:
                    self._outbox.put(request, now)
                return
            case "unknown_group":
                if group.registered and not group.leaving:
                    self._rejoin(group, now)
                return
            case "disagreement":
                self._counts.disagreements += 1
                self._tell_once(
                    "disagreement",
                    f"it has another text of {refusal.request_id!r}; such requests are no longer shared",
                )
        self._counts.refused += 1
        if refusal.kind == "evicted":
            self._mute(group.id)
        else:
            self._outbox.give_up(request)

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
                    request = requests[append.request_id] = Request(group, append.request_id)
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
                    self._outbox.remove(request)
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
