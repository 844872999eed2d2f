"""Routes that roll out whole batches, and abort unfinished responses."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import attrs
from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from seer_server.broker import RolloutBroker
from seer_server.http import Stream, read_json
from seer_server.streams import NDJSON, Encoding, ProgressS, results

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
    """Routes for batches, on the broker's open rollout."""

    broker: RolloutBroker

    async def roll_out(self, request: Request) -> Response:
        """Roll out a batch, and stream its completions; closing the stream aborts the rest."""
        asked = await read_json(request, BatchRequest)
        self.broker.require_version(asked.weight_version)
        subscription = await self.broker.submit_text(asked.records, streams=False, iteration=asked.iteration)
        names, updates = subscription.request_ids, subscription.updates
        lines = results(self.broker, names, updates, asked.progress_s, asked.encoding)
        return Stream(lines, partial(self.broker.unsubscribe, subscription), NDJSON)

    async def abort(self, request: Request) -> Response:
        """Abort groups and requests of any client; a name that is not under way is no error."""
        asked = await read_json(request, AbortRequest)
        return JSONResponse({"aborted": self.broker.abort(asked.groups, asked.requests)})
