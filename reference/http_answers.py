"""The answers of the server's routes: for each its body, its answer in words and the answer's schema."""

from __future__ import annotations

from typing import Any

import attrs
import msgspec
from seer_cli.controls import RunCommand
from seer_client import State
from seer_server.batches import AbortRequest, BatchRequest
from seer_server.control import LoadWeightsRequest, SleepRequest, UpdateRequest
from seer_server.protocol import (
    AbortIdsRequest,
    AbortOneRequest,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
)
from seer_server.reservations import ReservationRequest, RowRequest
from seer_server.responses_api import ResponsesRequest
from seer_server.sglang_api import SglangRequest
from seer_server.streams import NDJSON
from seer_server.tokens_api import TokensRequest
from seer_server.turns import ReleaseRequest

__all__ = ["LINES", "OPERATIONS", "STATUSES", "Operation"]

JSON = "application/json"
INTEGER: dict[str, Any] = {"type": "integer"}
STRING: dict[str, Any] = {"type": "string"}


@attrs.frozen
class Operation:
    """One method of one path: the struct that reads its body or query, and what it answers."""

    body: type[msgspec.Struct] | None
    answer: str
    schema: dict[str, Any] | None = None
    media: str = JSON
    query: bool = False
    """Whether the struct reads the query; the body then is safetensors."""


def record(**properties: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of an object that has all these properties."""
    return {"type": "object", "properties": properties, "required": [*properties]}


LINES = {
    "completion": "a response that is over, with the fields of a completion and `chunks` as a count",
    "progress": "sent while nothing finishes: `requests`, `finished` and `tokens` so far",
    "reserved": "the first line of a reservation: its `id`, `requests` and `weight_version`",
    "done": "the last line: everything is over; `requests` and `weight_version`",
    "error": "the last line of a stream that has failed, in the form of any error",
}
"""The keys that a line of a stream may have, of which each line has one."""

LINE = {
    "type": "object",
    "description": "One JSON object a line, with one key.",
    "properties": {name: {"description": text.replace("`", "")} for name, text in LINES.items()},
    "minProperties": 1,
    "maxProperties": 1,
}
CHOICES = {
    "type": "object",
    "description": "OpenAI's object, with the version of the weights.",
    "properties": {
        "id": {"type": "string"},
        "object": {"type": "string"},
        "created": INTEGER,
        "model": {"type": "string"},
        "choices": {"type": "array", "items": {"type": "object"}},
        "usage": {"type": "object"},
        "weight_version": INTEGER,
    },
    "required": ["id", "object", "created", "model", "choices"],
}
STREAMED = "With `stream` its pieces come as server-sent events, and `[DONE]` in the end."

OPERATIONS = {
    ("POST", "/v1/chat/completions"): Operation(
        ChatRequest, f"OpenAI's chat completion. {STREAMED}", CHOICES
    ),
    ("POST", "/v1/completions"): Operation(
        CompletionRequest, f"OpenAI's text completion. {STREAMED}", CHOICES
    ),
    ("POST", "/v1/responses"): Operation(
        ResponsesRequest,
        "OpenAI's response, with the version of the weights. With `stream` its events come as server-sent"
        " events, and `[DONE]` in the end.",
        record(
            id={"type": "string"},
            status={"type": "string"},
            output={"type": "array", "items": {"type": "object"}},
        ),
    ),
    ("POST", "/inference/v1/generate"): Operation(
        TokensRequest,
        f"vLLM's object, with the version of the weights. {STREAMED}",
        record(
            request_id={"type": "string"},
            output_mode={"type": "string"},
            choices={"type": "array", "items": {"type": "object"}},
        ),
    ),
    ("GET", "/metrics"): Operation(None, "Lines of Prometheus' text format.", None, "text/plain"),
    ("GET", "/targets"): Operation(
        None,
        "Where engines serve their own figures, for Prometheus' `http_sd_configs`.",
        {
            "type": "array",
            "items": record(targets={"type": "array", "items": STRING}, labels={"type": "object"}),
        },
    ),
    ("GET", "/version"): Operation(None, "`version`: that of Seer.", record(version={"type": "string"})),
    ("GET", "/v1/models"): Operation(
        None,
        "A list of one model, with `max_model_len` and `weight_version`.",
        record(object={"type": "string"}, data={"type": "array", "items": {"type": "object"}}),
    ),
    ("GET", "/v1/models/{model}"): Operation(
        None,
        "The model, with `max_model_len` and `weight_version`.",
        record(id={"type": "string"}, max_model_len=INTEGER, weight_version=INTEGER),
    ),
    ("POST", "/tokenize"): Operation(
        CompletionRequest,
        "`tokens`, their `count`, and `max_model_len`. A body with `messages` is that of a chat.",
        record(count=INTEGER, max_model_len=INTEGER, tokens={"type": "array", "items": INTEGER}),
    ),
    ("POST", "/detokenize"): Operation(
        DetokenizeRequest,
        "`prompt`: the text, with that of special tokens.",
        record(prompt={"type": "string"}),
    ),
    ("POST", "/generate"): Operation(
        SglangRequest,
        "`text`, `output_ids` and `meta_info` as SGLang has them; for several responses a list of such.",
    ),
    ("POST", "/abort_requests"): Operation(
        AbortIdsRequest, "`aborted`: how many responses.", record(status=STRING, aborted=INTEGER)
    ),
    ("POST", "/inference/v1/abort_requests"): Operation(
        AbortIdsRequest, "`aborted`: how many responses.", record(status=STRING, aborted=INTEGER)
    ),
    ("POST", "/abort_request"): Operation(AbortOneRequest, "Nothing."),
    ("DELETE", "/v1/trajectories/{id}"): Operation(
        None, "`ended`: 1, or 0 if there is no such trajectory.", record(ended=INTEGER)
    ),
    ("DELETE", "/v1/groups/{id}"): Operation(
        None, "`ended`: how many trajectories the group has.", record(ended=INTEGER)
    ),
    ("POST", "/programs/release"): Operation(
        ReleaseRequest,
        "`program_id`, and whether it was `released`: whether there was such a trajectory.",
        record(program_id=STRING, released={"type": "boolean"}),
    ),
    ("POST", "/finish_session"): Operation(
        None,
        "`ended`: 1, or 0 if there is no such trajectory. Its id is in the query, as `session_id`.",
        record(ended=INTEGER),
    ),
    ("POST", "/v1/rollouts"): Operation(
        BatchRequest, "A stream of `completion` and `progress` lines that ends with `done`.", LINE, NDJSON
    ),
    ("POST", "/v1/abort"): Operation(
        AbortRequest,
        "`aborted`: how many responses were aborted.",
        record(aborted=INTEGER),
    ),
    ("POST", "/v1/reservations"): Operation(
        ReservationRequest,
        "A stream of lines, the first with the reservation's id; it ends with `done`.",
        LINE,
        NDJSON,
    ),
    ("DELETE", "/v1/reservations/{id}"): Operation(None, "An empty object.", record()),
    ("POST", "/v1/weights"): Operation(
        LoadWeightsRequest,
        "`weight_version`: the version that is loaded now.",
        record(weight_version=INTEGER),
    ),
    ("PUT", "/v1/weights"): Operation(
        UpdateRequest,
        "`weight_version`: the version that is loaded now.",
        record(weight_version=INTEGER),
        query=True,
    ),
    ("POST", "/v1/sleep"): Operation(
        SleepRequest, "`freed_bytes`: the memory that the engines gave back.", record(freed_bytes=INTEGER)
    ),
    ("POST", "/v1/wake"): Operation(None, "An empty object.", record()),
    ("GET", "/v1/state"): Operation(
        None,
        "The state, with the fields of `seer_client.State`.",
        msgspec.json.schema_components([State])[1]["State"],
    ),
    ("POST", "/v1/command"): Operation(
        RunCommand, "`done`: what was done, in a sentence.", record(done=STRING)
    ),
    ("POST", "/v1/rows"): Operation(
        RowRequest, "A stream of `progress` lines and one `completion`; it ends with `done`.", LINE, NDJSON
    ),
    ("GET", "/health"): Operation(None, "Nothing; the status is 503 where no requests are taken."),
}
"""Every route.  A route that is missing here, or that the application lacks, fails a test."""

STATUSES = {
    400: "The request cannot be carried out as it is.",
    401: "The server's token is missing or wrong.",
    403: "A web page from elsewhere has made the request, or weights are to be loaded from below no root.",
    404: "There is no such path, model, group or reservation.",
    405: "The path does not take the method.",
    409: "Versions, sleep or unfinished requests stand against it.",
    413: "The body is too large.",
    429: "Too many responses are unfinished; the header `Retry-After` has the seconds to wait.",
    499: "The client has not sent the weights to their end.",
    500: "The server has failed at this request.",
    503: "The engines have failed, or are updated for a moment; then `Retry-After` has the seconds to wait.",
}
"""The statuses of errors."""
