"""Spans of requests, each with a child for every wait and every chunk.

Names of attributes are those of OpenTelemetry's semantic conventions for generative AI where there is one,
and begin with ``seer.`` otherwise.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from opentelemetry.util.types import AttributeValue
from seer_trace.chunk_runs import FIGURES, Cause, ChunkRun
from seer_trace.request_life import LifeReader, RequestLife, Wait

from seer_core.errors import printable
from seer_core.model.events import Command, Event
from seer_core.ports.policy import Observer
from seer_opentelemetry.delivery import SpanDelivery

__all__ = ["RequestSpans"]

Attributes = dict[str, AttributeValue]


class RequestSpans(Observer):
    """Sends a request's spans when it is over, and those of unfinished requests at the end.

    A span's times are the run's, laid on the machine's clock so that the first event stands at the time at
    which it came.  A simulated run has seconds of its own, which pass faster: its spans are as long as in the
    simulation, and may end in the future.
    """

    def __init__(self, endpoint: str) -> None:
        self._endpoint = endpoint
        self._reader = LifeReader()
        self._delivery: SpanDelivery | None = None
        self._zero_ns: int | None = None
        """The machine's time at 0 s of the run's clock."""

    async def start(self) -> None:
        """Begin anew, with a queue of spans that a thread sends."""
        self._delivery = SpanDelivery(self._endpoint)
        self._reader, self._zero_ns = LifeReader(), None

    async def stop(self) -> None:
        """Send the rest, for a few seconds at most."""
        delivery = self._delivery
        if delivery is not None:
            self._delivery = None
            for life in self._reader.rest():
                self._send(life, delivery)
            await delivery.close()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Queue the spans of requests that are over."""
        if self._zero_ns is None:
            self._zero_ns = time.time_ns() - round(now * 1e9)
        for life in self._reader.read(now, event, commands):
            if self._delivery is not None:
                self._send(life, self._delivery)

    def _send(self, life: RequestLife, delivery: SpanDelivery) -> None:
        end_s, error = life.finished_s, "the response failed" if life.finish_reason == "error" else ""
        if end_s is None:
            end_s, error = self._reader.now, "the run ended before the response"
        times = self._ns(life.submitted_s), self._ns(end_s)
        inside = delivery.add("text_completion", *times, _of_request(life), error)
        for part in life.parts:
            times = self._ns(part.begin_s), self._ns(part.end_s)
            if isinstance(part, Wait):
                longest = max(part.causes_s, key=lambda cause: part.causes_s[cause], default="turn")
                delivery.add(f"wait {longest}", *times, _of_wait(part.causes_s), parent=inside)
            else:
                error = printable(part.end) if part.result is None else ""
                name = f"chunk {printable(part.instance_id)}"
                delivery.add(name, *times, _of_chunk(part), error, parent=inside)

    def _ns(self, seconds: float) -> int:
        """Return the machine's time in nanoseconds."""
        return (self._zero_ns or 0) + round(seconds * 1e9)


def _of_request(life: RequestLife) -> Attributes:
    group, sampling = life.group, life.group.sampling
    index = int(life.request_id.rpartition("/")[2])
    resumed = group.resumed[index].tokens if group.resumed else 0
    request_id = printable(life.request_id)
    found: Attributes = {
        "gen_ai.operation.name": "text_completion",
        "gen_ai.provider.name": "seer",
        "gen_ai.request.max_tokens": group.max_tokens,
        "gen_ai.request.temperature": sampling.temperature,
        "gen_ai.request.top_p": sampling.top_p,
        "gen_ai.response.id": request_id,
        "gen_ai.usage.input_tokens": group.prompt_tokens,
        "gen_ai.usage.output_tokens": life.tokens + resumed,
        "seer.request_id": request_id,
        "seer.group_id": printable(group.id),
        "seer.group_size": group.n,
        "seer.finished_before_it": len(life.siblings_done),
        "seer.chunks": len(life.chunks),
        "seer.migrations": sum(each.migrated for each in life.chunks),
        "seer.resumed_tokens": resumed,
        **_of_wait(life.waited_s()),
    }
    if sampling.top_k:
        found["gen_ai.request.top_k"] = sampling.top_k
    if life.finish_reason is not None:
        found["gen_ai.response.finish_reasons"] = [life.finish_reason]
    return found


def _of_wait(causes_s: Mapping[Cause, float]) -> Attributes:
    return {f"seer.wait.{cause}_s": seconds for cause, seconds in causes_s.items()}


def _of_chunk(chunk: ChunkRun) -> Attributes:
    found: Attributes = {
        "seer.instance_id": printable(chunk.instance_id),
        "seer.node": printable(chunk.node),
        "seer.why": printable(chunk.why),
        "seer.migrated": chunk.migrated,
        "seer.max_tokens": chunk.max_tokens,
        "seer.kv_tokens": chunk.kv_tokens,
        "seer.end": printable(chunk.end),
    }
    if chunk.result is not None:
        found |= {f"seer.{name}": getattr(chunk.result, name) for name in FIGURES}
    return found
