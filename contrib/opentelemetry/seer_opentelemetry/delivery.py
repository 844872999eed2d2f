"""The way of spans to a collector: a bounded queue, and a thread that sends from it by OTLP over HTTP."""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from urllib.parse import urlsplit

import structlog
from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.environment_variables import (
    OTEL_BSP_MAX_QUEUE_SIZE,
    OTEL_EXPORTER_OTLP_ENDPOINT,
    OTEL_EXPORTER_OTLP_TRACES_ENDPOINT,
)
from opentelemetry.sdk.resources import SERVICE_NAME, Resource
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Status, StatusCode, set_span_in_context
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
from opentelemetry.util.types import AttributeValue

__all__ = ["SpanDelivery"]

log = structlog.get_logger("seer")

QUEUE_SPANS = 16_384
"""Spans that wait to be sent, unless ``OTEL_BSP_MAX_QUEUE_SIZE`` is set; the oldest of more are dropped."""

FLUSH_S = 5.0
"""The longest that the end of a run waits for the rest to be sent."""


class SpanDelivery:
    """Queues spans, and has them sent; a collector that does not answer costs spans, and no time."""

    def __init__(self, endpoint: str) -> None:
        self._exporter = _Exporter(endpoint)
        size = None if OTEL_BSP_MAX_QUEUE_SIZE in os.environ else QUEUE_SPANS
        self._provider = TracerProvider(resource=_resource(), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(self._exporter, max_queue_size=size))
        self._tracer = self._provider.get_tracer("seer")
        names = ("traceparent", "tracestate")
        carrier = {name: os.environ[name.upper()] for name in names if name.upper() in os.environ}
        self._root = TraceContextTextMapPropagator().extract(carrier, Context())
        self._queued = 0

    def add(
        self,
        name: str,
        begin_ns: int,
        end_ns: int,
        attributes: Mapping[str, AttributeValue],
        error: str = "",
        parent: Context | None = None,
    ) -> Context:
        """Queue a span that is over, and return the parent of what lies within it.

        Times are nanoseconds since 1970.  A span without a parent is below that of the environment variable
        ``TRACEPARENT``, if there is one.
        """
        with _quiet():
            span = self._tracer.start_span(
                name, self._root if parent is None else parent, attributes=attributes, start_time=begin_ns
            )
            if error:
                span.set_status(Status(StatusCode.ERROR, error))
            span.end(end_ns)
        self._queued += span.get_span_context().trace_flags.sampled
        return set_span_in_context(span, Context())

    async def close(self) -> None:
        """Send what is queued, for ``FLUSH_S`` at most, and log how many spans were lost."""
        flush = threading.Thread(target=self._provider.shutdown, daemon=True)
        flush.start()
        await asyncio.to_thread(flush.join, FLUSH_S)
        self._exporter.shutdown()
        lost = self._queued - self._exporter.sent
        if lost:
            log.warning("spans_lost", lost=lost, sent=self._exporter.sent, collector=self._exporter.collector)


class _Exporter(SpanExporter):
    """Sends spans, counts them, and logs the first failure."""

    def __init__(self, endpoint: str) -> None:
        self._otlp = OTLPSpanExporter(endpoint or None)
        variables = OTEL_EXPORTER_OTLP_TRACES_ENDPOINT, OTEL_EXPORTER_OTLP_ENDPOINT
        named = [endpoint, *(os.environ.get(each, "") for each in variables), "http://localhost:4318"]
        self.collector = urlsplit(next(filter(None, named))).netloc.rpartition("@")[2]
        self.sent = 0
        self._failed = self._closed = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        with _quiet():
            result = self._otlp.export(spans)
        if result is SpanExportResult.SUCCESS:
            self.sent += len(spans)
        elif not self._failed and not self._closed:
            self._failed = True
            remedy = "start a collector there, or name another; the run goes on"
            log.warning("spans_not_delivered", collector=self.collector, remedy=remedy)
        return result

    def shutdown(self) -> None:
        if not self._closed:
            self._closed = True
            self._otlp.shutdown()  # type: ignore[no-untyped-call]


def _resource() -> Resource:
    """Return what spans are of: the service ``seer``, unless the environment names it."""
    found = Resource.create()
    if str(found.attributes[SERVICE_NAME]).startswith("unknown_service"):
        return found.merge(Resource({SERVICE_NAME: "seer"}))
    return found


_here = threading.local()


class _NotOurs(logging.Filter):
    """Drops OpenTelemetry's own messages about our spans: one for each retry and each batch."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not getattr(_here, "quiet", False)


_NOT_OURS = _NotOurs()
for _name in ("opentelemetry.exporter.otlp.proto.http.trace_exporter", "opentelemetry.sdk._shared_internal"):
    logging.getLogger(_name).addFilter(_NOT_OURS)


@contextmanager
def _quiet() -> Iterator[None]:
    _here.quiet = True
    try:
        yield
    finally:
        _here.quiet = False
