"""Groups that are reserved first, and whose rows are then requested one at a time, by any client.

A framework that works on the rows of a batch one by one has their groups before it has their prompts.  The
first request for a row of a group brings its prompt, and the whole group is rolled out; the other rows are
requested without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from functools import partial
from secrets import token_hex
from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta, Struct
from seer_host.sampling_fields import SamplingChoice
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seer_core.errors import OverloadError, PromptError, SeerError, quote
from seer_core.model import Completion, PromptGroup
from seer_server.broker import GoneError, RolloutBroker, Subscription
from seer_server.direct import aborted
from seer_server.http import Refused, Stream, read_json
from seer_server.streams import NDJSON, Encoding, ProgressS, line, over_within, results
from seer_server.structured_outputs import FIELD, FormChecks

__all__ = ["Reservations"]

PROMPTS = ("prompt", "prompt_token_ids", "messages")
SAMPLING = ("max_tokens", *SamplingChoice.__struct_fields__)


class ReservationRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/reservations``."""

    groups: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Records as in a prompts file, whose prompts may still be missing."""
    iteration: Annotated[int, Meta(ge=0)] = 0
    """The iteration, from which seeds follow."""
    weight_version: int | None = None
    """The version that the groups need. Without it any will do."""
    prompt_wait_s: Annotated[float, Meta(ge=0, le=600)] = 2.0
    """How long the groups wait for the last prompt, from the first on."""
    progress_s: ProgressS = 5.0
    """The stream has a line of progress after so long without another line."""


class RowRequest(SamplingChoice, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/rows``: one row of a group, and the fields that the group's reservation left
    out.
    """

    group_id: str
    """The reserved group."""
    index: Annotated[int, Meta(ge=0)]
    """The number of the response within its group."""
    prompt: str | None = None
    """The prompt as text."""
    prompt_token_ids: list[int] | None = None
    """The prompt as token ids."""
    messages: list[dict[str, Any]] | None = None
    """The prompt as messages of a chat."""
    images: list[str] | None = None
    """The prompt's images, in the order of their places: data URLs, or paths as in a prompts file."""
    max_tokens: int | None = None
    """The most tokens of the response."""
    weight_version: int | None = None
    """The version that the row needs. Without it any will do."""
    progress_s: ProgressS = 5.0
    """The stream has a line of progress after so long without another line."""
    encoding: Encoding = "list"
    """How token ids and log-probs are written: as lists, or as base64 of little-endian int32 and float32."""

    @property
    def given(self) -> dict[str, Any]:
        """The fields of the group's record that it brings."""
        fields = {name: getattr(self, name) for name in (*PROMPTS, "images", *SAMPLING)}
        given = {name: value for name, value in fields.items() if value is not None}
        plain: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(given))  # as the reservation's
        return plain


@attrs.define(eq=False)
class _ReservedGroup:
    """A reserved group; it has a ``submission`` from the time it has its prompt, unless that is refused.

    ``reading`` is held while a row's prompt is read.
    """

    reservation: _Reservation
    reserved: Mapping[str, Any]
    n: int
    submission: _Submission | None = None
    reading: asyncio.Lock = attrs.Factory(asyncio.Lock)

    @property
    def id(self) -> str:
        name: str = self.reserved["group_id"]
        return name

    @property
    def record(self) -> Mapping[str, Any]:
        return self.reserved if self.submission is None else self.submission.record


@attrs.define(eq=False)
class _Submission:
    """A group with its prompt, as its ``record`` has it and ``made`` of that; each of its ``rows`` receives a
    completion, or an error.

    The ``outcome`` is None while the group waits for the prompts of others, or for room.  Then it is the
    subscription to the group's responses, or the error with which all rows were refused.
    """

    group: _ReservedGroup
    record: Mapping[str, Any]
    made: PromptGroup
    rows: Sequence[asyncio.Queue[Completion | SeerError]]
    requested: set[int] = attrs.Factory(set)
    aborted: set[int] = attrs.Factory(set)
    """The rows that were aborted before it had an outcome."""
    outcome: Subscription | SeerError | None = None

    def refuse(self, error: SeerError) -> None:
        """End all rows with an error; the next request for a row of the group begins a new submission."""
        self.group.submission = None
        self.outcome = error
        self.fail(error)

    def fail(self, error: SeerError) -> None:
        for row in self.rows:
            row.put_nowait(error)


@attrs.define(eq=False)
class _Reservation:
    """Groups reserved together; they are submitted together as far as their prompts come in time."""

    broker: RolloutBroker
    iteration: int
    prompt_wait_s: float
    requests: int
    id: str = attrs.Factory(partial(token_hex, 12))
    groups: dict[str, _ReservedGroup] = attrs.Factory(dict)
    finished: int = 0
    all_over: asyncio.Event = attrs.Factory(asyncio.Event)
    _collected: list[_Submission] | None = attrs.Factory(list)
    """Groups that wait for the prompts of others; None once groups are submitted as their prompts come."""
    _without_room: list[_Submission] = attrs.Factory(list)
    _timer: asyncio.TimerHandle | None = None
    _rows_over: int = 0
    _subscriptions: dict[Subscription, asyncio.Task[None]] = attrs.Factory(dict)

    def add_prompt(self, group: _ReservedGroup, record: Mapping[str, Any], made: PromptGroup) -> _Submission:
        """Submit a group that has its prompt now, at once or with the others."""
        submission = _Submission(group, record, made, [asyncio.Queue() for _ in range(group.n)])
        group.submission = submission
        if self._collected is None:
            self._submit([submission])
            return submission
        self._collected.append(submission)
        if len(self._collected) == len(self.groups):
            self._submit_collected()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self.prompt_wait_s, self._submit_collected)
        return submission

    def _submit_collected(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        collected, self._collected = self._collected, None
        self._submit(collected or [])

    def _submit(self, submissions: Sequence[_Submission]) -> None:
        if not submissions:
            return
        try:
            subscription = self.broker.submit([each.made for each in submissions], streams=False)
        except OverloadError:
            self._submit_later(submissions)
        except PromptError as error:
            if len(submissions) > 1:  # the others can be rolled out
                for each in submissions:
                    self._submit([each])
            else:
                submissions[0].refuse(error)
        except SeerError as error:
            for each in submissions:
                each.refuse(error)
        else:
            self._subscriptions[subscription] = asyncio.create_task(self._deliver(subscription, submissions))
            for each in submissions:
                each.outcome = subscription
            self.broker.abort([], [f"{each.group.id}/{row}" for each in submissions for row in each.aborted])

    def _submit_later(self, submissions: Sequence[_Submission]) -> None:
        """Submit groups when there may be room, at the present rate of completions."""
        if not self._without_room:
            pause_s = self.broker.retry_s(sum(each.group.n for each in submissions))
            self._timer = asyncio.get_running_loop().call_later(pause_s, self._submit_again)
        self._without_room += submissions

    def _submit_again(self) -> None:
        submissions, self._without_room = self._without_room, []
        self._submit(submissions)

    async def _deliver(self, subscription: Subscription, submissions: Sequence[_Submission]) -> None:
        """Put each completion into the queue of its row, whether the row was requested already or not."""
        by_group = {each.group.id: each for each in submissions}
        left = sum(each.group.n for each in submissions)
        while left:
            update = await subscription.updates.get()
            if isinstance(update, Completion):
                left -= 1
                submission = by_group[update.group_id]
                if update.index not in submission.aborted:
                    self.finished += 1
                    submission.rows[update.index].put_nowait(update)
            elif isinstance(update, SeerError):
                for each in submissions:
                    each.fail(update)
                return

    def abort(self, groups: Collection[str], requests: Collection[str]) -> int:
        """Abort rows of groups that wait to be submitted; return their number."""
        return self._abort(lambda group, row: group in groups or f"{group}/{row}" in requests)

    def abort_all(self) -> int:
        """Abort all rows of groups that wait to be submitted; return their number."""
        return self._abort(lambda group, row: True)

    def _abort(self, is_named: Callable[[str, int], bool]) -> int:
        number = 0
        for group in self.groups.values():
            submission = group.submission
            if submission is None or submission.outcome is not None:
                continue
            for row in range(group.n):
                if row not in submission.aborted and is_named(group.id, row):
                    submission.aborted.add(row)
                    submission.rows[row].put_nowait(aborted(self.broker.runtime, submission.made, row))
                    self.finished += 1
                    number += 1
        return number

    def row_over(self) -> None:
        """Count a row that was requested, and has been answered or aborted."""
        self._rows_over += 1
        if self._rows_over == self.requests:
            self.all_over.set()

    def close(self) -> None:
        """Abort what is unfinished, and end the rows that wait with an error."""
        self.all_over.set()
        if self._timer is not None:
            self._timer.cancel()
        for subscription, task in self._subscriptions.items():
            task.cancel()
            self.broker.unsubscribe(subscription)
        over = GoneError("the reservation was closed before this row was over; reserve its group again")
        for group in self.groups.values():
            if group.submission is not None:
                group.submission.refuse(over)


@attrs.define(eq=False)
class Reservations:
    """Routes for reserved groups and their rows."""

    broker: RolloutBroker
    forms: FormChecks
    _reservations: dict[str, _Reservation] = attrs.Factory(dict)
    _groups: dict[str, _ReservedGroup] = attrs.Factory(dict)

    async def reserve(self, request: Request) -> Response:
        """Reserve groups, and stream how many of their rows are over; closing the stream aborts them."""
        asked = await read_json(request, ReservationRequest)
        self.broker.require_version(asked.weight_version)
        await self.forms.require_all(asked.groups, self.broker.runtime.model.controls)
        self.broker.require_rollout()
        self.broker.require_capacity(len(asked.groups))
        # With a prompt in the place of a missing one, any other flaw of a record is found now.
        records = [
            each if _has_prompt(each) else {"max_tokens": 1, **each, "prompt_token_ids": [0]}
            for each in asked.groups
        ]
        groups = await self.broker.read(records, asked.iteration)
        self.broker.require_version(asked.weight_version)
        reservation = self._open(asked, groups)
        lines = self._watch(reservation, asked.progress_s)
        return Stream(lines, partial(self._close, reservation), NDJSON)

    def _open(self, asked: ReservationRequest, groups: Sequence[PromptGroup]) -> _Reservation:
        broker = self.broker
        broker.require_rollout()
        requests = sum(group.n for group in groups)
        broker.require_capacity(requests)
        reservation = _Reservation(broker, asked.iteration, asked.prompt_wait_s, requests)
        for group, record in zip(groups, asked.groups, strict=True):
            if record.get("group_id") is None:
                raise PromptError("a reserved group needs a group_id, by which its rows are requested")
            if group.id in self._groups or group.id in reservation.groups:
                raise PromptError(f"group {quote(group.id)} is reserved already; give each group its own id")
            given = {name: value for name, value in record.items() if value is not None}
            reservation.groups[group.id] = _ReservedGroup(reservation, given, group.n)
        self._reservations[reservation.id] = reservation
        self._groups |= reservation.groups
        broker.waiting.append(reservation)
        broker.reserve(requests)
        for each, made in zip(reservation.groups.values(), groups, strict=True):
            if _has_prompt(each.reserved):
                reservation.add_prompt(each, each.reserved, made)
        return reservation

    async def release(self, request: Request) -> Response:
        """Close a reservation, if it is still open; when this is answered, nothing of it is left."""
        reservation = self._reservations.get(request.path_params["id"])
        if reservation is not None:
            self._close(reservation)
        return JSONResponse({})

    def _close(self, reservation: _Reservation) -> None:
        if self._reservations.pop(reservation.id, None) is None:
            return
        self.broker.waiting.remove(reservation)
        reservation.close()
        for name in reservation.groups:
            del self._groups[name]
        self.broker.release(reservation.requests)

    async def _watch(self, reservation: _Reservation, progress_s: float) -> AsyncIterator[bytes]:
        version, requests = self.broker.runtime.weight_version, reservation.requests
        yield line("reserved", {"id": reservation.id, "requests": requests, "weight_version": version})
        over = asyncio.ensure_future(reservation.all_over.wait())
        try:
            while not await over_within(over, progress_s):
                yield line("progress", {"requests": requests, "finished": reservation.finished})
        finally:
            over.cancel()
        yield line("done", {"requests": requests, "weight_version": version})

    async def stream_row(self, request: Request) -> Response:
        """Answer with one row of a reserved group; closing the stream aborts it."""
        asked = await read_json(request, RowRequest)
        self.broker.require_version(asked.weight_version)
        form = {FIELD: asked.structured_outputs}
        await self.forms.require_all([form], self.broker.runtime.model.controls)
        self.broker.require_rollout()
        submission = await self._request_row(asked)
        if isinstance(submission.outcome, SeerError):
            raise submission.outcome
        names, row = [f"{asked.group_id}/{asked.index}"], submission.rows[asked.index]
        lines = results(self.broker, names, row, asked.progress_s, asked.encoding)
        return Stream(lines, partial(self._leave_row, submission, asked.index), NDJSON)

    async def _request_row(self, asked: RowRequest) -> _Submission:
        """Return the submission of the row's group, which this request may begin."""
        group = self._group(asked)
        async with group.reading:
            submission = group.submission
            if submission is not None and asked.index in submission.requested:
                raise Refused(409, f"row {asked.index} of group {quote(group.id)} has been requested already")
            for name, value in asked.given.items():
                if group.record.get(name, value if submission is None else None) != value:
                    raise Refused(
                        409,
                        f"{name} of row {asked.index} is not that of group {quote(group.id)}; rows of a group"
                        " have one prompt and one way of sampling",
                    )
            if submission is None:
                submission = await self._begin(group, {**group.reserved, **asked.given}, asked)
            submission.requested.add(asked.index)
            return submission

    def _group(self, asked: RowRequest) -> _ReservedGroup:
        group = self._groups.get(asked.group_id)
        if group is None:
            raise GoneError(f"there is no reserved group {quote(asked.group_id)}; reserve it first")
        if asked.index >= group.n:
            raise PromptError(
                f"index is {asked.index}, and group {quote(group.id)} has {group.n} rows, from 0"
            )
        return group

    async def _begin(
        self, group: _ReservedGroup, record: Mapping[str, Any], asked: RowRequest
    ) -> _Submission:
        """Submit a group by the record that the first request for a row has completed."""
        if not _has_prompt(record):
            raise PromptError(f"group {quote(group.id)} has no prompt yet; its first row must bring it")
        [made] = await self.broker.read([record], group.reservation.iteration)
        if self._group(asked) is not group:
            raise GoneError(f"group {quote(group.id)} was released meanwhile; reserve it again")
        self.broker.require_version(asked.weight_version)
        self.broker.require_rollout()
        return group.reservation.add_prompt(group, record, made)

    def _leave_row(self, submission: _Submission, index: int) -> None:
        match submission.outcome:
            case None if index in submission.aborted:
                submission.group.reservation.row_over()
            case None:
                submission.requested.discard(index)  # another request may have the row
            case Subscription() as subscription:
                self.broker.abort_request(subscription, f"{submission.group.id}/{index}")
                submission.group.reservation.row_over()


def _has_prompt(record: Mapping[str, Any]) -> bool:
    return any(record.get(name) is not None for name in PROMPTS)
