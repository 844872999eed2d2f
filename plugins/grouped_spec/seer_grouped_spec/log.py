"""The token logs that a draft server keeps: by group and request, no more than was written.

Pure: no I/O, no clock; ``now`` comes as an argument.  The statistics that drafts are made of live in the
clients' own copies; here a token costs its four bytes and a comparison of bytes where it comes twice.
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

__all__ = ["TokenLogs", "UnknownClient"]

REPLY_BYTES = 256 << 10
REPLY_APPENDS = 1024
LEAST_SLICE_BYTES = 4 << 10
BYTES_PER_GROUP = 1024
BYTES_PER_REQUEST = 512
MAX_CLIENTS = 4096
CLIENT_SILENCE_S = 60.0


class UnknownClient(Exception):
    """A client that has no group here: it must register."""


@attrs.define(eq=False)
class _Lease:
    """A client's part in a group; ``have``: the tokens it has, by request; ``seen``: when it had all."""

    ttl_s: float
    deadline: float
    have: dict[str, int] = attrs.field(factory=dict)
    seen: int = -1


@attrs.define(eq=False)
class _Group:
    """The logs of a group, as raw int32; ``clock`` counts what was appended."""

    id: str
    logs: dict[str, bytearray] = attrs.field(factory=dict)
    leases: dict[bytes, _Lease] = attrs.field(factory=dict)
    clock: int = 0
    held_bytes: int = BYTES_PER_GROUP
    evicted: bool = False


@attrs.define(eq=False)
class _Client:
    heard: float
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
                *("groups_refused", "clients_refused"),
            ),
            0,
        )
    )
    held_bytes: int = 0
    _groups: OrderedDict[str, _Group] = attrs.field(factory=OrderedDict)  # least recently written first
    _clients: dict[bytes, _Client] = attrs.field(factory=dict)

    def register_group(self, client: bytes, group_id: str, ttl_s: float, now: float) -> bool:
        """Let a client take part in a group; False if there is no room for it."""
        if len(group_id.encode()) > MAX_ID_BYTES:
            return False
        member = self._clients.get(client)
        if member is None:
            if len(self._clients) >= MAX_CLIENTS:
                self.counts["clients_refused"] += 1
                return False
            member = self._clients[client] = _Client(now)
        group = self._groups.get(group_id)
        if group is None:
            if not self._make_room(BYTES_PER_GROUP, None):
                self.counts["groups_refused"] += 1
                return False
            group = self._groups[group_id] = _Group(group_id)
            self.held_bytes += group.held_bytes
        lease = group.leases.get(client)
        if lease is None:
            lease = group.leases[client] = _Lease(ttl_s, now + ttl_s)
        lease.ttl_s, lease.deadline = ttl_s, now + ttl_s
        member.groups[group_id] = group
        return True

    def unregister_group(self, client: bytes, group_id: str) -> None:
        """End a client's part in a group; the last one out drops the group."""
        group = self._groups.get(group_id)
        if group is not None and group.leases.pop(client, None) is not None:
            member = self._clients[client]
            del member.groups[group_id]
            if not group.leases:
                self.drop_group(group_id, "finished")
            self._forget_if_idle(client)

    def update_cst(
        self,
        client: bytes,
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
                group.held_bytes += BYTES_PER_REQUEST
                self.held_bytes += BYTES_PER_REQUEST
            log += new_tokens[common:] if common else new_tokens
            group.clock += 1
            group.held_bytes += fresh
            self.held_bytes += fresh
            self.counts["tokens_in"] += fresh // TOKEN_BYTES
            self._groups.move_to_end(group_id)
            if self.held_bytes > self.memory_bytes and not self._make_room(0, group):
                self._evict(group)
                return Refusal(group_id, request_id, "evicted", 0)
        self.counts["appends"] += 1
        end = prev_token_count + size // TOKEN_BYTES
        if end > lease.have.get(request_id, 0):
            lease.have[request_id] = end
        lease.deadline = now + lease.ttl_s
        return None

    def fetch_cst(
        self, client: bytes, draft_cache_infos: dict[str, dict[str, int]], now: float
    ) -> tuple[list[tuple[str, list[Append]]], list[str], bool]:
        """Return what a client has not got, by group; the groups it has lost; and whether there is more.

        Raises:
            UnknownClient: it has not registered, or not since this server started.
        """
        member = self._clients.get(client)
        if member is None:
            raise UnknownClient
        member.heard = now
        for group_id, info in draft_cache_infos.items():
            group = member.groups.get(group_id)
            if group is not None:
                lease = group.leases[client]
                lease.have = {request: have for request, have in info.items() if request in group.logs}
                lease.seen = -1
        dropped, member.dropped = member.dropped, []
        found = []
        budget, appends = self.reply_bytes, REPLY_APPENDS
        for group_id, group in list(member.groups.items()):
            lease = group.leases[client]
            if lease.seen == group.clock:
                continue
            news, used = _news(group, lease, budget, appends)
            if news:
                found.append((group_id, news))
                lease.deadline = now + lease.ttl_s
                budget -= used
                appends -= len(news)
            if lease.seen != group.clock:  # the reply is full: next time others come first
                del member.groups[group_id]
                member.groups[group_id] = group
                self._count_out(found)
                return found, dropped, True
        self._count_out(found)
        self._forget_if_idle(client)
        return found, dropped, False

    def drop_group(self, group_id: str, why: str) -> None:
        """Forget a group; its clients hear of it with their next fetch."""
        group = self._groups.pop(group_id)
        self.held_bytes -= group.held_bytes
        self.counts[f"groups_{why}"] += 1
        for client in list(group.leases):
            self._tell_dropped(client, group_id)

    def expire(self, now: float) -> None:
        """End the parts of clients that have let their time pass, and drop groups that have none left."""
        for group_id, group in list(self._groups.items()):
            late = [client for client, lease in group.leases.items() if lease.deadline <= now]
            for client in late:
                del group.leases[client]
                self._tell_dropped(client, group_id)
            if not group.leases:
                self.drop_group(group_id, "expired")
        for client in list(self._clients):
            member = self._clients[client]
            if not member.groups and now - member.heard > CLIENT_SILENCE_S:
                del self._clients[client]

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

    def _tell_dropped(self, client: bytes, group_id: str) -> None:
        member = self._clients.get(client)
        if member is not None and member.groups.pop(group_id, None) is not None:
            member.dropped.append(group_id)

    def _forget_if_idle(self, client: bytes) -> None:
        member = self._clients.get(client)
        if member is not None and not member.groups and not member.dropped:
            del self._clients[client]

    def _make_room(self, wanted: int, spared: _Group | None) -> bool:
        """Empty groups, the least recently written first, until ``wanted`` bytes more would fit."""
        if self.held_bytes + wanted <= self.memory_bytes:
            return True
        for group in list(self._groups.values()):
            if group is not spared and group.logs:
                self._evict(group)
                if self.held_bytes + wanted <= self.memory_bytes:
                    return True
        return False

    def _evict(self, group: _Group) -> None:
        """Empty a group and close it, so that it is not sent again at once; its clients may stay in it."""
        self.counts["groups_evicted"] += 1
        self.held_bytes += BYTES_PER_GROUP - group.held_bytes
        group.held_bytes = BYTES_PER_GROUP
        group.evicted = True
        group.logs.clear()

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
