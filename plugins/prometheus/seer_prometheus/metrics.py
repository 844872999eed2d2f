"""Figures of rollouts for Prometheus, counted from what the scheduler sees and does.

Names follow Prometheus: counters end in ``_total``, and units are part of the name.  An instance that is
started again counts on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from urllib.parse import urlsplit

from msgspec import json
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from seer_core.model.events import (
    ChunkFailed,
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    Event,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
)
from seer_core.ports.policy import Observer

__all__ = ["Metrics"]

SECONDS = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1200, 3600, 7200)
TOKENS = (16, 64, 256, 1024, 2048, 4096, 8192, 16384, 32768, 65536, 131072)
ENGINE = ("engine",)
"""An instance's id: ``instance`` is what Prometheus calls the server itself."""

PARTS = ("drafting", "kv_pool")
"""The parts of an instance that may fail."""


class Metrics(Observer):
    """Counts events, in a registry of its own."""

    def __init__(self) -> None:
        self.registry = registry = CollectorRegistry()
        self.on_first_event: Callable[[], None] | None = None

        def counter(name: str, help: str, labels: Sequence[str] = ()) -> Counter:
            return Counter(f"seer_{name}", help, labels, registry=registry)

        def gauge(name: str, help: str, labels: Sequence[str] = ()) -> Gauge:
            return Gauge(f"seer_{name}", help, labels, registry=registry)

        self._groups = counter("groups", "Prompt groups that were submitted")
        self._responses = counter("responses", "Responses that are over", ("finish_reason",))
        self._chunks = counter("chunks", "Chunks that have finished", ENGINE)
        self._failures = counter("chunk_failures", "Chunks that an instance gave back", ENGINE)
        self._migrations = counter("migrations", "Chunks on another instance than the one before")
        self._tokens = counter("generated_tokens", "Tokens of finished chunks", ENGINE)
        self._context = {
            name: counter(f"{name}_tokens", f"Tokens of chunks' contexts whose KV {what}", ENGINE)
            for name, what in (
                ("cached", "the instance had"),
                ("pool", "came from the pool"),
                ("prefilled", "was computed before the first new token"),
            )
        }
        self._drafted = counter("draft_tokens", "Draft tokens that were verified", ENGINE)
        self._accepted = counter("accepted_draft_tokens", "Draft tokens that were accepted", ENGINE)
        self._losses = counter("instance_losses", "Instances that died by themselves", ENGINE)
        self._degraded = counter(
            "instance_degradations", "Parts of instances that failed", ("engine", "part")
        )
        self._stepping = counter("instance_step_seconds", "Time that instances spent in steps", ENGINE)
        self._drafting = counter("instance_drafting_seconds", "The part of it that drafts took", ENGINE)
        self._up = gauge("instance_up", "Whether an instance takes chunks", ENGINE)
        self._running = gauge("instance_running_requests", "Requests that an instance decodes", ENGINE)
        self._waiting = gauge("instance_waiting_requests", "Requests that wait within an instance", ENGINE)
        self._served = gauge(
            "instance_metrics_info", "Where an engine's own figures are", ("engine", "address")
        )
        self._addresses: dict[str, str] = {}
        self._kv = gauge("instance_kv_usage_ratio", "The share of an instance's KV in use", ENGINE)
        self._seconds = Histogram(
            "seer_response_seconds", "From submission to the end", buckets=SECONDS, registry=registry
        )
        self._lengths = Histogram(
            "seer_response_tokens", "Tokens of responses", buckets=TOKENS, registry=registry
        )
        self._spent: dict[tuple[str, str], float] = {}
        self._submitted: dict[str, tuple[float, int]] = {}
        self._written: dict[str, int] = {}

    def read(self, name: str, help: str, value: Callable[[], float]) -> None:
        """Have a figure read whenever there is a scrape."""
        Gauge(f"seer_{name}", help, registry=self.registry).set_function(value)

    def targets(self) -> bytes:
        """Return where engines serve figures of their own, as JSON for Prometheus' ``http_sd_configs``."""
        return json.encode(
            [
                {"targets": [urlsplit(address).netloc], "labels": {"engine": instance}}
                for instance, address in sorted(self._addresses.items())
            ]
        )

    async def start(self) -> None:
        """Forget the requests of a rollout that has failed: their ids may come again."""
        self._submitted.clear()
        self._written.clear()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Count an event, and what is done about it."""
        if self.on_first_event is not None:
            self.on_first_event()
            self.on_first_event = None
        match event:
            case ChunkFinished():
                self._count_chunk(event)
            case InstanceReported():
                self._take_report(event)
            case GroupsSubmitted(groups):
                self._groups.inc(len(groups))
                for group in groups:
                    self._submitted[group.id] = now, group.n
                    for index, response in enumerate(group.resumed):
                        self._written[f"{group.id}/{index}"] = response.tokens
            case EnvironmentAnswered(request_id, tokens):
                self._written[request_id] = self._written.get(request_id, 0) + tokens
            case ChunkFailed():
                self._failures.labels(event.instance_id).inc()
            case InstanceStarted(info):
                self._start(info.id)
                if info.metrics_address:
                    self._served.labels(info.id, info.metrics_address).set(1)
                    self._addresses[info.id] = info.metrics_address
            case InstanceLeaving(instance_id):
                self._up.labels(instance_id).set(0)
            case InstanceLost() | InstanceStopped():
                self._losses.labels(event.instance_id).inc(isinstance(event, InstanceLost))
                self._down(event.instance_id)
            case InstanceDegraded():
                self._degraded.labels(event.instance_id, event.what).inc()
        for command in commands:
            match command:
                case Dispatch():
                    self._migrations.inc(command.migrated)
                case Complete():
                    self._complete(now, command)

    def _start(self, instance: str) -> None:
        """Begin to count at 0: a counter that appears with its first event shows no increase."""
        self._up.labels(instance).set(1)
        for counter in (self._chunks, self._failures, self._tokens, *self._context.values()):
            counter.labels(instance)
        for counter in (self._drafted, self._accepted, self._losses, self._stepping, self._drafting):
            counter.labels(instance)
        for part in PARTS:
            self._degraded.labels(instance, part)

    def _complete(self, now: float, over: Complete) -> None:
        """Count a response that is over."""
        group_id = over.request_id.rpartition("/")[0]
        self._responses.labels(over.finish_reason).inc()
        self._lengths.observe(self._written.pop(over.request_id, 0))
        submitted_s, left = self._submitted.pop(group_id, (now, 1))
        self._seconds.observe(now - submitted_s)
        if left > 1:
            self._submitted[group_id] = submitted_s, left - 1

    def _count_chunk(self, event: ChunkFinished) -> None:
        instance = event.instance_id
        self._written[event.request_id] = self._written.get(event.request_id, 0) + event.tokens
        self._chunks.labels(instance).inc()
        self._tokens.labels(instance).inc(event.tokens)
        self._drafted.labels(instance).inc(event.drafted)
        self._accepted.labels(instance).inc(event.accepted)
        for name, counter in self._context.items():
            counter.labels(instance).inc(getattr(event, f"{name}_tokens"))

    def _take_report(self, event: InstanceReported) -> None:
        instance = event.instance_id
        self._running.labels(instance).set(event.running)
        self._waiting.labels(instance).set(event.waiting)
        self._kv.labels(instance).set(event.kv_usage)
        self._advance(self._stepping, instance, "steps", event.stepping_s)
        self._advance(self._drafting, instance, "drafts", event.drafting_s)

    def _advance(self, counter: Counter, instance: str, what: str, total_s: float) -> None:
        """Count on to a total that begins anew when its instance does."""
        before_s = self._spent.get((instance, what), 0.0)
        counter.labels(instance).inc(total_s - before_s if total_s >= before_s else total_s)
        self._spent[instance, what] = total_s

    def _down(self, instance: str) -> None:
        self._up.labels(instance).set(0)
        if (address := self._addresses.pop(instance, None)) is not None:
            self._served.remove(instance, address)
        for gauge in (self._running, self._waiting, self._kv):
            gauge.labels(instance).set(0)
        for what in ("steps", "drafts"):
            self._spent.pop((instance, what), None)
