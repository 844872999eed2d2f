"""Whole batches over HTTP, and giving up what is under way."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import attrs
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seer_server.desk import Desk
from seer_server.http import Stream, check_token, read_body
from seer_server.streams import NDJSON, Encoding, ProgressS, decode, expect_version, refusing, results

__all__ = ["Batches"]


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/rollouts``; ``records`` are lines of a prompts file."""

    records: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    iteration: Annotated[int, Meta(ge=0)] = 0
    weight_version: int | None = None
    progress_s: ProgressS = 5.0
    encoding: Encoding = "list"


class AbortRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/abort``; a request is ``GROUP/INDEX``."""

    groups: list[str] = []
    requests: list[str] = []


@attrs.define(eq=False)
class Batches:
    """Routes for batches."""

    desk: Desk
    token: str | None

    async def roll_out(self, request: Request) -> Response:
        """Roll out a batch, and stream its completions; whoever closes the stream gives up the rest."""
        check_token(request, self.token)
        body = await read_body(request)
        with refusing(self.desk):
            asked = decode(body, BatchRequest)
            expect_version(self.desk, asked.weight_version)
            ticket = self.desk.ask(asked.records, streams=False, iteration=asked.iteration)
        names = [f"{group.id}/{index}" for group in ticket.groups for index in range(group.n)]
        lines = results(self.desk, names, ticket.news, asked.progress_s, asked.encoding)
        return Stream(lines, partial(self.desk.leave, ticket), NDJSON)

    async def abort(self, request: Request) -> Response:
        """Give up groups and requests, whoever has asked for them; names that are unknown are no error."""
        check_token(request, self.token)
        body = await read_body(request)
        with refusing(self.desk):
            asked = decode(body, AbortRequest)
        return JSONResponse({"aborted": self.desk.abort(asked.groups, asked.requests)})
