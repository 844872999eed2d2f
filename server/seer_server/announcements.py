"""Groups that are announced first, and whose rows are then asked for one at a time, by whomever.

A framework that works on the rows of a batch one by one knows their groups, but not their prompts yet.  The
first row of a group that comes brings its prompt, and the whole group is rolled out; the others claim theirs.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Annotated, Any

import attrs
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seer_core.errors import OverloadError, PromptError, SeerError, quote
from seer_core.model import Completion
from seer_server.desk import Desk, GoneError, Ticket
from seer_server.http import Refused, Stream, check_token, read_body
from seer_server.streams import (
    NDJSON,
    Encoding,
    ProgressS,
    decode,
    error_line,
    expect_version,
    line,
    over_within,
    refusing,
    results,
)

__all__ = ["Announcements"]

PROMPTS = ("prompt", "prompt_token_ids", "messages")
SAMPLING = ("max_tokens", "temperature", "top_p", "top_k")


class AnnouncementRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/announcements``; ``groups`` are records, whose prompts may still be missing."""

    groups: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    iteration: Annotated[int, Meta(ge=0)] = 0
    weight_version: int | None = None
    gather_s: Annotated[float, Meta(ge=0, le=600)] = 2.0
    progress_s: ProgressS = 5.0


class ClaimRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/claims``: one row of a group, and what is not known of the group yet."""

    group_id: str
    index: Annotated[int, Meta(ge=0)]
    prompt: str | None = None
    prompt_token_ids: list[int] | None = None
    messages: list[dict[str, Any]] | None = None
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    weight_version: int | None = None
    progress_s: ProgressS = 5.0
    encoding: Encoding = "list"

    @property
    def given(self) -> dict[str, Any]:
        """What it says of the group."""
        known = {name: getattr(self, name) for name in (*PROMPTS, *SAMPLING)}
        return {name: value for name, value in known.items() if value is not None}


@attrs.define(eq=False)
class _Group:
    """One announced group; claims wait for ``added``, which raises why the whole group was refused."""

    announcement: _Announcement
    announced: Mapping[str, Any]
    n: int
    rows: dict[int, asyncio.Queue[Completion | SeerError]]
    record: dict[str, Any] = attrs.field(init=False)
    claimed: set[int] = attrs.Factory(set)
    prompted: bool = False
    ticket: Ticket | None = None
    added: asyncio.Future[None] = attrs.Factory(lambda: asyncio.get_running_loop().create_future())

    def __attrs_post_init__(self) -> None:
        self.record = {name: value for name, value in self.announced.items() if value is not None}

    @property
    def id(self) -> str:
        name: str = self.announced["group_id"]
        return name

    def refuse(self, error: SeerError) -> None:
        """Let those who wait know why it is not rolled out, and the next who comes begin anew."""
        added, self.added = self.added, asyncio.get_running_loop().create_future()
        self.claimed.clear()
        self.prompted = False
        self.__attrs_post_init__()
        added.set_exception(error)
        added.exception()  # nobody may wait any more


@attrs.define(eq=False)
class _Announcement:
    """Groups announced together; they are submitted together as far as their prompts come in time."""

    desk: Desk
    iteration: int
    gather_s: float
    id: str = attrs.Factory(partial(token_hex, 12))
    groups: dict[str, _Group] = attrs.Factory(dict)
    requests: int = 0
    finished: int = 0
    left: int = 0
    all_over: asyncio.Event = attrs.Factory(asyncio.Event)
    _gathered: bool = False
    _prompted: int = 0
    _timer: asyncio.TimerHandle | None = None
    _no_room: list[_Group] = attrs.Factory(list)
    _tickets: dict[Ticket, asyncio.Task[None]] = attrs.Factory(dict)

    def prompted(self, group: _Group) -> None:
        """Submit a group that has its prompt now, at once or with the others."""
        group.prompted = True
        self._prompted += 1
        if self._gathered:
            self._submit([group])
        elif self._prompted == len(self.groups):
            self.submit_gathered()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.gather_s, self.submit_gathered)

    def submit_gathered(self) -> None:
        """Submit all groups that have their prompt, and wait for no others."""
        if self._timer is not None:
            self._timer.cancel()
        self._gathered = True
        self._submit([group for group in self.groups.values() if group.prompted])

    def _submit(self, groups: Sequence[_Group]) -> None:
        if not groups:
            return
        records = [group.record for group in groups]
        try:
            ticket = self.desk.ask(records, streams=False, iteration=self.iteration)
        except OverloadError:
            self._submit_later(groups)
        except PromptError as error:
            if len(groups) > 1:  # the others can be rolled out
                for group in groups:
                    self._submit([group])
            else:
                groups[0].refuse(error)
        except SeerError as error:
            for group in groups:
                group.refuse(error)
        else:
            self._tickets[ticket] = asyncio.create_task(self._hand_out(ticket, groups))
            for group in groups:
                group.ticket = ticket
                group.added.set_result(None)

    def _submit_later(self, groups: Sequence[_Group]) -> None:
        """Submit groups when there may be room, at the present pace."""
        if not self._no_room:
            pause_s = self.desk.retry_s(sum(group.n for group in groups))
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._submit_again)
        self._no_room += groups

    def _submit_again(self) -> None:
        groups, self._no_room = self._no_room, []
        self._submit(groups)

    async def _hand_out(self, ticket: Ticket, groups: Sequence[_Group]) -> None:
        """Put what has finished where its row waits for it, or will be claimed."""
        left = sum(group.n for group in groups)
        while left:
            news = await ticket.news.get()
            if isinstance(news, Completion):
                left -= 1
                self.finished += 1
                self.groups[news.group_id].rows[news.index].put_nowait(news)
            elif isinstance(news, SeerError):
                for group in groups:
                    for row in group.rows.values():
                        row.put_nowait(news)
                return

    def row_over(self) -> None:
        """Note that a row was claimed, and has been answered or given up."""
        self.left -= 1
        if not self.left:
            self.all_over.set()

    def close(self) -> None:
        """Give up what is unfinished, and tell those who wait."""
        self.all_over.set()
        if self._timer is not None:
            self._timer.cancel()
        for ticket, task in self._tickets.items():
            task.cancel()
            self.desk.leave(ticket)
        over = GoneError("the announcement was closed before this row was over; announce its group again")
        for group in self.groups.values():
            if not group.added.done():
                group.refuse(over)
            for row in group.rows.values():
                row.put_nowait(over)


@attrs.define(eq=False)
class Announcements:
    """Routes for announced groups and their rows."""

    desk: Desk
    token: str | None
    _announcements: dict[str, _Announcement] = attrs.Factory(dict)
    _groups: dict[str, _Group] = attrs.Factory(dict)

    async def announce(self, request: Request) -> Response:
        """Take note of groups, and stream how far they are; whoever closes the stream gives them up."""
        check_token(request, self.token)
        body = await read_body(request)
        with refusing(self.desk):
            asked = decode(body, AnnouncementRequest)
            expect_version(self.desk, asked.weight_version)
            announcement = self._open(asked)
        lines = self._watch(announcement, asked.progress_s)
        return Stream(lines, partial(self._close, announcement), NDJSON)

    def _open(self, asked: AnnouncementRequest) -> _Announcement:
        desk = self.desk
        _ = desk.rollout
        desk.expect_possible(len(asked.groups))
        # Whatever is wrong with a record is found with any prompt in the place of one that is to come.
        groups = desk.runtime.groups(
            [
                each if _has_prompt(each) else {"max_tokens": 1, **each, "prompt_token_ids": [0]}
                for each in asked.groups
            ],
            iteration=asked.iteration,
        )
        desk.expect_possible(sum(group.n for group in groups))
        announcement = _Announcement(desk, asked.iteration, asked.gather_s)
        for group, record in zip(groups, asked.groups, strict=True):
            if record.get("group_id") is None:
                raise PromptError("an announced group needs a group_id, by which its rows are claimed")
            if group.id in self._groups or group.id in announcement.groups:
                raise PromptError(f"group {quote(group.id)} is announced already; give each group its own id")
            rows: dict[int, asyncio.Queue[Completion | SeerError]]
            rows = {index: asyncio.Queue() for index in range(group.n)}
            announcement.groups[group.id] = _Group(announcement, record, group.n, rows)
            announcement.requests += group.n
        announcement.left = announcement.requests
        self._announcements[announcement.id] = announcement
        self._groups |= announcement.groups
        desk.announce(announcement.requests)
        for each in announcement.groups.values():
            if _has_prompt(each.record):
                announcement.prompted(each)
        return announcement

    async def leave(self, request: Request) -> Response:
        """Close an announcement, if it is still open; when this is answered, nothing of it is left."""
        check_token(request, self.token)
        announcement = self._announcements.get(request.path_params["id"])
        if announcement is not None:
            self._close(announcement)
        return JSONResponse({})

    def _close(self, announcement: _Announcement) -> None:
        if self._announcements.pop(announcement.id, None) is None:
            return
        announcement.close()
        for name in announcement.groups:
            del self._groups[name]
        self.desk.close(announcement.requests)

    async def _watch(self, announcement: _Announcement, progress_s: float) -> AsyncIterator[bytes]:
        version, requests = self.desk.runtime.weight_version, announcement.requests
        yield line("announced", {"id": announcement.id, "requests": requests, "weight_version": version})
        over = asyncio.ensure_future(announcement.all_over.wait())
        try:
            while not await over_within(over, progress_s):
                yield line("progress", {"requests": requests, "finished": announcement.finished})
        finally:
            over.cancel()
        yield line("done", {"requests": requests, "weight_version": version})

    async def claim(self, request: Request) -> Response:
        """Answer with one row of an announced group; whoever closes the stream gives it up."""
        check_token(request, self.token)
        body = await read_body(request)
        with refusing(self.desk):
            asked = decode(body, ClaimRequest)
            expect_version(self.desk, asked.weight_version)
            _ = self.desk.rollout
            group, added = self._claimed(asked)
            if added.done():
                added.result()
        return Stream(self._row(group, added, asked), partial(self._leave, group, added, asked.index), NDJSON)

    async def _row(
        self, group: _Group, added: asyncio.Future[None], asked: ClaimRequest
    ) -> AsyncIterator[bytes]:
        while not await over_within(added, asked.progress_s):
            yield line("progress", {"requests": 1, "finished": 0})
        try:
            added.result()
        except SeerError as error:
            yield error_line(error)
            return
        names, row = [f"{group.id}/{asked.index}"], group.rows[asked.index]
        async for each in results(self.desk, names, row, asked.progress_s, asked.encoding):
            yield each

    def _claimed(self, asked: ClaimRequest) -> tuple[_Group, asyncio.Future[None]]:
        """Return the group of a row that is claimed now and has its prompt, and what to wait for."""
        group = self._groups.get(asked.group_id)
        if group is None:
            raise GoneError(f"there is no announced group {quote(asked.group_id)}; announce it first")
        if asked.index >= group.n:
            raise PromptError(
                f"index is {asked.index}, and group {quote(group.id)} has {group.n} rows, from 0"
            )
        if asked.index in group.claimed:
            raise Refused(409, f"row {asked.index} of group {quote(group.id)} has been claimed already")
        for name, value in asked.given.items():
            if group.record.get(name, None if group.prompted else value) != value:
                raise Refused(
                    409,
                    f"{name} of row {asked.index} is not that of group {quote(group.id)}; rows of a group"
                    " have one prompt and one way of sampling",
                )
        added = group.added
        if group.prompted:
            group.claimed.add(asked.index)
            return group, added
        record = group.record | asked.given
        if not _has_prompt(record):
            raise PromptError(f"group {quote(group.id)} has no prompt yet; its first row must bring it")
        self.desk.runtime.groups([record], iteration=group.announcement.iteration)
        group.claimed.add(asked.index)
        group.record = record
        group.announcement.prompted(group)
        return group, added

    def _leave(self, group: _Group, added: asyncio.Future[None], index: int) -> None:
        if self._groups.get(group.id) is not group:
            return
        if not added.done():
            group.claimed.discard(index)  # somebody else may claim it
        elif added.exception() is None and group.ticket is not None:
            self.desk.give_up(group.ticket, f"{group.id}/{index}")
            group.announcement.row_over()


def _has_prompt(record: Mapping[str, Any]) -> bool:
    return any(record.get(name) is not None for name in PROMPTS)
