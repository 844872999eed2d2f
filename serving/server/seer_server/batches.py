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
from seer_server.structured_outputs import FormChecks

__all__ = ["Batches"]


class BatchRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/rollouts``."""

    records: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """The prompts, each as a line of a prompts file."""
    iteration: Annotated[int, Meta(ge=0)] = 0
    """The iteration, from which seeds follow."""
    weight_version: int | None = None
    """The version that the batch needs; another one that is loaded is refused. Without it any will do."""
    progress_s: ProgressS = 5.0
    """The stream has a line of progress after so long without another line."""
    encoding: Encoding = "list"
    """How token ids and log-probs are written: as lists, or as base64 of little-endian int32 and float32."""


class AbortRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/abort``."""

    groups: list[str] = []
    """The ids of groups whose responses are all aborted."""
    requests: list[str] = []
    """The requests that are aborted, as ``GROUP/INDEX``."""


@attrs.define(eq=False)
class Batches:
    """Routes for batches, on the broker's open rollout."""

    broker: RolloutBroker
    forms: FormChecks

    async def roll_out(self, request: Request) -> Response:
        """Roll out a batch, and stream its completions; closing the stream aborts the rest."""
        asked = await read_json(request, BatchRequest)
        self.broker.require_version(asked.weight_version)
        await self.forms.require_all(asked.records, self.broker.runtime.model.controls)
        subscription = await self.broker.submit_text(
            asked.records, streams=False, iteration=asked.iteration, weight_version=asked.weight_version
        )
        names, updates = subscription.request_ids, subscription.updates
        lines = results(self.broker, names, updates, asked.progress_s, asked.encoding)
        return Stream(lines, partial(self.broker.unsubscribe, subscription), NDJSON)

    async def abort(self, request: Request) -> Response:
        """Abort groups and requests of any client; a name that is not under way is no error."""
        asked = await read_json(request, AbortRequest)
        number = self.broker.abort(asked.groups, asked.requests)
        await self.broker.read_so_far()
        return JSONResponse({"aborted": number + self.broker.abort(asked.groups, asked.requests)})
