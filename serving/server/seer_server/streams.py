"""Streamed answers: one JSON object a line, with lines of progress while nothing finishes."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from seer_host.routed_experts import whole_attachments

from seer_core.errors import EngineError, SeerError
from seer_core.model import Completion
from seer_core.model.arrays import Logprobs, Tokens
from seer_server.broker import RolloutBroker
from seer_server.http import refusal
from seer_server.updates import UpdateQueue

__all__ = [
    "NDJSON",
    "Encoding",
    "ProgressS",
    "error_line",
    "line",
    "over_within",
    "results",
]

NDJSON = "application/x-ndjson"

Encoding = Literal["list", "base64"]
"""How token ids and log-probs are written: as lists, or as base64 of little-endian int32 and float32."""

ProgressS = Annotated[float, Meta(ge=0.01, le=60)]
"""Seconds without another line after which a stream has a line of progress."""


def line(kind: str, value: Any) -> bytes:
    """Return a line of a stream."""
    return msgspec.json.encode({kind: value}) + b"\n"


def error_line(error: SeerError) -> bytes:
    """Return the line with which a stream ends that has failed."""
    return msgspec.json.encode(refusal(error).body) + b"\n"


async def over_within(waited: asyncio.Future[Any], seconds: float) -> bool:
    """Wait for so long, and return whether it is over; it goes on if it is not."""
    await asyncio.wait({waited}, timeout=seconds)
    return waited.done()


async def results(
    broker: RolloutBroker,
    names: Sequence[str],
    updates: UpdateQueue | asyncio.Queue[Completion | SeerError],
    progress_s: float,
    encoding: Encoding,
) -> AsyncIterator[bytes]:
    """Yield the completions of these requests as they come, and in the end ``done``, or an error."""
    left, written, failed = set(names), 0, 0
    while left:
        try:
            async with asyncio.timeout(progress_s):  # wait_for may swallow a cancellation in Python 3.11
                found = await updates.get()
        except TimeoutError:
            tokens = written + broker.written(left)
            counts = {"requests": len(names), "finished": len(names) - len(left), "tokens": tokens}
            yield line("progress", counts)
            continue
        if isinstance(found, SeerError):
            yield error_line(found)
            return
        if isinstance(found, Completion) and found.request_id in left:
            left.remove(found.request_id)
            written += len(found.token_ids)
            failed += found.finish_reason == "error"
            yield line("completion", _plain(found, encoding))
    if failed == len(names):
        yield error_line(EngineError("every response ended in an error; look into the server's log"))
        return
    yield line("done", {"requests": len(names), "weight_version": broker.runtime.weight_version})


def _plain(completion: Completion, encoding: Encoding) -> dict[str, Any]:
    more: dict[str, Any] = {}
    if completion.top_logprobs is not None:
        more["top_logprobs"] = list(completion.top_logprobs)
    if (prompt := completion.prompt_logprobs) is not None:
        tops = None if prompt.top_logprobs is None else list(prompt.top_logprobs)
        more["prompt_logprobs"] = {"logprobs": list(prompt.logprobs), "top_logprobs": tops}
    if attachments := whole_attachments(completion):
        more["attachments"] = attachments
    return {
        **more,
        "request_id": completion.request_id,
        "group_id": completion.group_id,
        "index": completion.index,
        "seed": completion.seed,
        "token_ids": _values(completion.token_ids, Tokens, encoding),
        "logprobs": _values(completion.logprobs, Logprobs, encoding),
        "text": completion.text,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "weight_version": completion.weight_version,
        "chunks": len(completion.chunks),
        "instances": completion.instances,
        "metadata": completion.metadata,
    }


def _values(values: Any, kind: type[Tokens] | type[Logprobs], encoding: Encoding) -> Any:
    if encoding == "list":
        return list(values)
    return base64.b64encode(kind(values).tobytes()).decode()
