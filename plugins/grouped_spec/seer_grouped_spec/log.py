"""The token logs that a draft server keeps: by group and request, no more than was written.

Pure: no I/O, no clock; ``now`` comes as an argument.  The statistics that drafts are made of live in the
clients' own copies; here a token costs its four bytes and a comparison of bytes where it comes twice.

A client is a number; what it takes part in ends with ``leave``.  Everything that a client can make grow is
counted in ``held_bytes`` by what it takes in CPython, measured and rounded up: text, the ids of groups and
requests, each client's part in a group, and what it has of each request.
"""

from __future__ import annotations

from collections import OrderedDict

import attrs

from seer_grouped_spec.wire import (
    MAX_APPEND_TOKENS,
    MAX_ID_BYTES,
    MAX_REQUESTS,
    TOKEN_BYTES,
    Append,
    Refusal,
)

__all__ = ["TokenLogs"]

REPLY_BYTES = 256 << 10
REPLY_APPENDS = 1024
LEAST_SLICE_BYTES = 4 << 10
BYTES_PER_GROUP = 1024
BYTES_PER_REQUEST = 512
BYTES_PER_LEASE = 768
BYTES_PER_COUNT = 192
"""Of a client's count of what it has of a request."""

SPARE = 8
"""A log that grows takes an eighth more than it holds."""


@attrs.define(eq=False)
class _Lease:
    """A client's part in a group; ``have``: the tokens it has, by request; ``seen``: when it had all."""

    ttl_s: float
    deadline: float
    have: dict[str, int] = attrs.field(factory=dict)
    seen: int = -1


@attrs.define(eq=False)
class _Group:
    """The logs of a group, as raw int32; ``clock`` counts what was appended; ``bare_bytes``: without any."""

    id: str
    bare_bytes: int
    logs: dict[str, bytearray] = attrs.field(factory=dict)
    leases: dict[int, _Lease] = attrs.field(factory=dict)
    clock: int = 0
    held_bytes: int = 0
    evicted: bool = False


@attrs.define(eq=False)
class _Client:
    """A client's groups, and those it is still to be told are gone, whose leases count until then."""

    groups: dict[str, _Group] = attrs.field(factory=dict)
    dropped: list[str] = attrs.field(factory=list)


@attrs.define(eq=False)
class TokenLogs:
    """All groups of one server, within ``memory_bytes``."""

    memory_bytes: int
    reply_bytes: int = REPLY_BYTES
    counts: dict[str, int] = attrs.field(
        factory=lambda: dict.fromkeys(
            (
                *("appends", "tokens_in", "tokens_out", "tokens_repeated", "gaps", "disagreements"),
                *("unknown_groups", "bad_tokens", "groups_finished", "groups_expired", "groups_evicted"),
                "groups_refused",
            ),
            0,
        )
    )
    held_bytes: int = 0
    _groups: dict[str, _Group] = attrs.field(factory=dict)
    _written: OrderedDict[str, _Group] = attrs.field(factory=OrderedDict)  # have logs; least recently first
    _clients: dict[int, _Client] = attrs.field(factory=dict)

    def register_group(self, client: int, group_id: str, ttl_s: float, now: float) -> bool:
        """Let a client take part in a group; False if there is no room for it."""
        id_bytes = len(group_id.encode())
        if id_bytes > MAX_ID_BYTES:
            return False
        group = self._groups.get(group_id)
        lease = None if group is None else group.leases.get(client)
        if group is None or lease is None:
            group_bytes = BYTES_PER_GROUP + id_bytes if group is None else 0
            if not self._make_room(group_bytes + BYTES_PER_LEASE, None):
                self.counts["groups_refused"] += 1
                return False
            if group is None:
                group = self._groups[group_id] = _Group(group_id, bare_bytes=group_bytes)
                self._hold(group, group_bytes)
            self._hold(group, BYTES_PER_LEASE)
            lease = group.leases[client] = _Lease(ttl_s, now + ttl_s)
            self._clients.setdefault(client, _Client()).groups[group_id] = group
        lease.ttl_s, lease.deadline = ttl_s, now + ttl_s
        return True

    def unregister_group(self, client: int, group_id: str) -> None:
        """End a client's part in a group; the last one out drops the group."""
        group = self._groups.get(group_id)
        if group is not None and client in group.leases:
            self._end_lease(group, client)
            member = self._clients[client]
            del member.groups[group_id]
            if not group.leases:
                self.drop_group(group_id, "finished")
            self._forget_if_idle(client)

    def leave(self, client: int) -> None:
        """End all that a client takes part in: its connection has ended."""
        member = self._clients.pop(client, None)
        if member is not None:
            self.held_bytes -= BYTES_PER_LEASE * len(member.dropped)
            for group in member.groups.values():
                self._end_lease(group, client)
                if not group.leases:
                    self.drop_group(group.id, "finished")

    def has_part(self, client: int) -> bool:
        """Say whether a client takes part in any group."""
        member = self._clients.get(client)
        return member is not None and bool(member.groups)

    def update_cst(
        self,
        client: int,
        group_id: str,
        request_id: str,
        prev_token_count: int,
        new_tokens: bytes,
        now: float,
    ) -> Refusal | None:
        """Append to a request's log; what is there already is skipped if it is the same."""
        group = self._groups.get(group_id)
        lease = None if group is None else group.leases.get(client)
        if group is None or lease is None:
            self.counts["unknown_groups"] += 1
            return Refusal(group_id, request_id, "unknown_group", 0)
        if group.evicted:
            return Refusal(group_id, request_id, "evicted", 0)
        log = group.logs.get(request_id)
        have_bytes = 0 if log is None else len(log)
        have = have_bytes // TOKEN_BYTES
        if prev_token_count > have:
            self.counts["gaps"] += 1
            return Refusal(group_id, request_id, "gap", have)
        size = len(new_tokens)
        if size % TOKEN_BYTES or (size and max(new_tokens[TOKEN_BYTES - 1 :: TOKEN_BYTES]) > 127):
            self.counts["bad_tokens"] += 1
            return Refusal(group_id, request_id, "bad_tokens", have)
        start = TOKEN_BYTES * prev_token_count
        common = min(have_bytes - start, size)
        if common:
            assert log is not None
            if log[start : start + common] != new_tokens[:common]:
                self.counts["disagreements"] += 1
                return Refusal(group_id, request_id, "disagreement", have)
            self.counts["tokens_repeated"] += common // TOKEN_BYTES
        fresh = size - common
        if fresh:
            if log is None:
                if len(group.logs) >= MAX_REQUESTS or len(request_id.encode()) > MAX_ID_BYTES:
                    return Refusal(group_id, request_id, "too_many", 0)
                log = group.logs[request_id] = bytearray()
                self._hold(group, BYTES_PER_REQUEST + len(request_id))
            log += new_tokens[common:] if common else new_tokens
            group.clock += 1
            self._hold(group, fresh + fresh // SPARE)
            self.counts["tokens_in"] += fresh // TOKEN_BYTES
            self._written[group_id] = group
            self._written.move_to_end(group_id)
            if self.held_bytes > self.memory_bytes and not self._make_room(0, group):
                self._evict(group)
                return Refusal(group_id, request_id, "evicted", 0)
        self.counts["appends"] += 1
        end = prev_token_count + size // TOKEN_BYTES
        known = lease.have.get(request_id)
        if end > (known or 0):
            lease.have[request_id] = end
            if known is None:
                self._hold(group, BYTES_PER_COUNT)
        lease.deadline = now + lease.ttl_s
        return None

    def restate(self, client: int, group_id: str, info: dict[str, int]) -> None:
        """Believe a client that it has so many tokens of each request of a group."""
        group = self._groups.get(group_id)
        lease = None if group is None else group.leases.get(client)
        if group is not None and lease is not None:
            before = len(lease.have)
            lease.have = {request: have for request, have in info.items() if request in group.logs}
            lease.seen = -1
            self._hold(group, BYTES_PER_COUNT * (len(lease.have) - before))
            self._make_room(0, None)

    def fetch_cst(self, client: int, now: float) -> tuple[list[tuple[str, list[Append]]], list[str], bool]:
        """Return what a client has not got, by group; the groups it has lost; and whether there is more."""
        member = self._clients.get(client)
        if member is None:
            return [], [], False
        dropped, member.dropped = member.dropped, []
        self.held_bytes -= BYTES_PER_LEASE * len(dropped)
        found = []
        budget, appends = self.reply_bytes, REPLY_APPENDS
        for group_id, group in list(member.groups.items()):
            lease = group.leases[client]
            if lease.seen == group.clock:
                continue
            counts = len(lease.have)
            news, used = _news(group, lease, budget, appends)
            self._hold(group, BYTES_PER_COUNT * (len(lease.have) - counts))
            if news:
                found.append((group_id, news))
                lease.deadline = now + lease.ttl_s
                budget -= used
                appends -= len(news)
            if lease.seen != group.clock:  # the reply is full: next time others come first
                del member.groups[group_id]
                member.groups[group_id] = group
                self._count_out(found)
                self._make_room(0, None)
                return found, dropped, True
        self._count_out(found)
        self._make_room(0, None)
        self._forget_if_idle(client)
        return found, dropped, False

    def drop_group(self, group_id: str, why: str) -> None:
        """Forget a group; its clients hear of it with their next fetch."""
        group = self._groups.pop(group_id)
        self._written.pop(group_id, None)
        self.counts[f"groups_{why}"] += 1
        for client in list(group.leases):
            self._tell_dropped(group, client)
        self.held_bytes -= group.held_bytes

    def expire(self, now: float) -> None:
        """End the parts of clients that have let their time pass, and drop groups that have none left."""
        for group_id, group in list(self._groups.items()):
            late = [client for client, lease in group.leases.items() if lease.deadline <= now]
            for client in late:
                self._tell_dropped(group, client)
            if not group.leases:
                self.drop_group(group_id, "expired")

    def stats(self) -> dict[str, float]:
        """Return figures: what is held, and what has happened since the start."""
        return {
            "groups": len(self._groups),
            "requests": sum(len(group.logs) for group in self._groups.values()),
            "clients": len(self._clients),
            "held_bytes": self.held_bytes,
            "memory_bytes": self.memory_bytes,
            **self.counts,
        }

    def _hold(self, group: _Group, more_bytes: int) -> None:
        group.held_bytes += more_bytes
        self.held_bytes += more_bytes

    def _end_lease(self, group: _Group, client: int) -> None:
        lease = group.leases.pop(client)
        self._hold(group, -BYTES_PER_LEASE - BYTES_PER_COUNT * len(lease.have))

    def _tell_dropped(self, group: _Group, client: int) -> None:
        """End a client's part in a group; it is told with its next fetch, and held for so long."""
        self._end_lease(group, client)
        member = self._clients[client]
        del member.groups[group.id]
        member.dropped.append(group.id)
        self.held_bytes += BYTES_PER_LEASE

    def _forget_if_idle(self, client: int) -> None:
        member = self._clients.get(client)
        if member is not None and not member.groups and not member.dropped:
            del self._clients[client]

    def _make_room(self, wanted: int, spared: _Group | None) -> bool:
        """Empty groups, the least recently written first, until ``wanted`` bytes more would fit."""
        while self.held_bytes + wanted > self.memory_bytes:
            oldest = next((group for group in self._written.values() if group is not spared), None)
            if oldest is None:
                return False
            self._evict(oldest)
        return True

    def _evict(self, group: _Group) -> None:
        """Empty a group and close it, so that it is not sent again at once; its clients may stay in it."""
        self.counts["groups_evicted"] += 1
        self._written.pop(group.id, None)
        group.logs.clear()
        for lease in group.leases.values():
            lease.have.clear()
        kept = group.bare_bytes + BYTES_PER_LEASE * len(group.leases)
        self._hold(group, kept - group.held_bytes)
        group.evicted = True

    def _count_out(self, found: list[tuple[str, list[Append]]]) -> None:
        size = sum(len(append.new_tokens) for _, news in found for append in news)
        self.counts["tokens_out"] += size // TOKEN_BYTES


def _news(group: _Group, lease: _Lease, budget: int, appends: int) -> tuple[list[Append], int]:
    """Return what a client lacks of a group, within a budget of bytes and appends, and the bytes taken."""
    news: list[Append] = []
    have = lease.have
    used = 0
    for request_id, log in group.logs.items():
        known = have.get(request_id, 0)
        lacking = len(log) - TOKEN_BYTES * known
        if lacking <= 0:
            continue
        room = min(budget - used, TOKEN_BYTES * MAX_APPEND_TOKENS)
        if len(news) >= appends or (lacking > room and room < LEAST_SLICE_BYTES):
            return news, used
        size = min(lacking, room // TOKEN_BYTES * TOKEN_BYTES)
        start = TOKEN_BYTES * known
        news.append(Append(request_id, known, bytes(log[start : start + size])))
        have[request_id] = known + size // TOKEN_BYTES
        used += size
        if size < lacking:
            return news, used
    lease.seen = group.clock
    return news, used
