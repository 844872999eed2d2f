"""What does a scheduling decision cost: the scheduler with divided_rollout and context_sched, no engines?

The load holds its size: a random chunk in flight ends, the scheduler handles that and sends new ones,
and a fresh group is submitted, unmeasured, whenever one's worth of requests has finished.  It is
measured in two phases: while every group's probe waits, and after all first probes have been aborted,
when groups compete by estimate.  Lengths are log-normal and alike within a group.
"""

from __future__ import annotations

import argparse
import gc
import random
import statistics
import sys
import tracemalloc
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from time import perf_counter, thread_time_ns

from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware

from bench.harness import Row, cell, markdown, spread_of
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    Abort,
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceStarted,
    RequestsAborted,
)
from seer_core.scheduling.scheduler import Policies, Scheduler, Slot

DEPENDS_ON = ("seer_core", "plugins/divided_rollout", "plugins/context_sched")
ROUNDS = 3

CHUNK_TOKENS = 2048
STAY_KV_FRACTION = 0.25
PROMPT_TOKENS = 512
MAX_TOKENS = 40960
LOG_MEAN, LOG_SIGMA_GROUP, LOG_SIGMA_REQUEST = 8.5, 0.8, 0.4
KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING = 600_000, 16, 64
SLICE = 500


def clock_cost_ns() -> int:
    """Return what reading the clock adds to an interval."""
    return int(statistics.median(-(thread_time_ns() - thread_time_ns()) for _ in range(10_000)))


CLOCK_NS = clock_cost_ns()


def make_scheduler() -> Scheduler:
    """Return a scheduler with the techniques' own defaults."""
    return Scheduler(
        Policies(
            Slot("splitter", "divided_rollout", Chunks(CHUNK_TOKENS)),
            Slot("prioritizer", "context_sched", ContextAware()),
            Slot("placer", "divided_rollout", KvAware(STAY_KV_FRACTION)),
        )
    )


def make_groups(first: int, count: int, size: int) -> tuple[GroupSpec, ...]:
    """Return ``count`` groups of ``size`` requests, numbered from ``first``."""
    return tuple(
        GroupSpec(f"group-{k}", PROMPT_TOKENS, size, MAX_TOKENS) for k in range(first, first + count)
    )


class SteadyLoad:
    """A scheduler under a steady load, with the true lengths and the chunks in flight."""

    def __init__(self, queued: int, instances: int, group_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = make_scheduler()
        self.group_size = group_size
        self.groups = 0
        self.finished = 0
        self.lengths = array("l")
        self.in_flight: list[Dispatch] = []
        self.where: dict[str, int] = {}
        for k in range(instances):
            info = InstanceInfo(f"instance-{k}", KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING, MAX_TOKENS * 2)
            self.carry_out(self.scheduler.handle(InstanceStarted(info), 0.0))
        self.submit(-(-(queued + instances * MAX_RUNNING) // group_size))

    def submit(self, count: int) -> None:
        """Submit new groups."""
        for _ in range(count):
            center = self.random.gauss(LOG_MEAN, LOG_SIGMA_GROUP)
            for _ in range(self.group_size):
                drawn = self.random.lognormvariate(center, LOG_SIGMA_REQUEST)
                self.lengths.append(max(1, min(MAX_TOKENS, round(drawn))))
        event = GroupsSubmitted(make_groups(self.groups, count, self.group_size))
        self.groups += count
        self.carry_out(self.scheduler.handle(event, 0.0))

    def abort_probes(self) -> None:
        """Leave the groups to be ordered by their estimates alone."""
        probes = tuple(request.id for request in self.scheduler.buffer if request.index == 0)
        self.carry_out(self.scheduler.handle(RequestsAborted(probes), 0.0))

    def next_event(self) -> Event:
        """End a random chunk in flight as its true length demands."""
        flight = self.in_flight[self.random.randrange(len(self.in_flight))]
        request = self.scheduler.buffer.get(flight.request_id)
        assert request is not None
        left = self.lengths[request.seq] - request.generated_tokens
        self.drop(flight.request_id)
        return ChunkFinished(
            flight.request_id, flight.instance_id, min(left, flight.max_tokens), left <= flight.max_tokens
        )

    def carry_out(self, commands: list[Command]) -> int:
        """Play the runtime's part and return the number of decisions."""
        decisions = 0
        for command in commands:
            match command:
                case Dispatch():
                    self.where[command.request_id] = len(self.in_flight)
                    self.in_flight.append(command)
                    decisions += 1
                case Complete():
                    self.finished += 1
                case Abort():
                    self.drop(command.request_id)
        return decisions

    def drop(self, request_id: str) -> None:
        """Remove a chunk in flight; the last one takes its place."""
        k, last = self.where.pop(request_id), self.in_flight.pop()
        if last.request_id != request_id:
            self.in_flight[k] = last
            self.where[last.request_id] = k

    def run(self, events: int) -> tuple[list[int], list[int]]:
        """Return the CPU time in ns, and the decisions made, of each of ``events`` calls of ``handle``."""
        times, decisions = [], []
        handle = self.scheduler.handle
        for _ in range(events):
            event = self.next_event()
            start = thread_time_ns()
            commands = handle(event, 0.0)
            times.append(thread_time_ns() - start - CLOCK_NS)
            decisions.append(self.carry_out(commands))
            if self.finished >= self.group_size:
                self.finished -= self.group_size
                self.submit(1)
        return times, decisions


@contextmanager
def frozen(freeze: bool) -> Iterator[None]:
    """Hide all existing objects from the garbage collector."""
    gc.collect()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(load: SteadyLoad, events: int, rounds: int, freeze: bool) -> Row:
    """Return CPU microseconds per event and per decision, spreads over the rounds.

    ``quiet_us`` is per decision in the fastest twentieth of slices of 500 events: what remains without
    other load on the machine and without the garbage collector.
    """
    per_event, per_decision, slowest, p99, slices = [], [], [], [], []
    with frozen(freeze):
        for _ in range(rounds):
            times, decisions = load.run(events)
            per_event.append(sum(times) / events / 1e3)
            per_decision.append(sum(times) / max(sum(decisions), 1) / 1e3)
            for k in range(0, events, SLICE):
                slices.append(sum(times[k : k + SLICE]) / max(sum(decisions[k : k + SLICE]), 1) / 1e3)
            slowest.append(max(times) / 1e3)
            p99.append(sorted(times)[int(events * 0.99)] / 1e3)
    return {
        "event_us": spread_of(per_event),
        "decision_us": spread_of(per_decision),
        "quiet_us": sorted(slices)[len(slices) // 20],
        "p99_event_us": statistics.median(p99),
        "slowest_event_us": max(slowest),
    }


def bytes_per_request(queued: int, group_size: int) -> float:
    """Return what a queued request adds to the scheduler's memory, by tracemalloc."""
    scheduler = make_scheduler()
    gc.collect()
    tracemalloc.start()
    event = GroupsSubmitted(make_groups(0, queued // group_size, group_size))
    scheduler.handle(event, 0.0)
    del event
    gc.collect()
    used, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    return used / len(scheduler.buffer)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--queued", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--events", type=int, default=20_000, help="measured events a round (default 20000)")
    parser.add_argument("--warmup", type=int, default=20_000, help="events before each phase (default 20000)")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt (default 8)")
    parser.add_argument("--seed", type=int, default=0)


def run(options: argparse.Namespace) -> list[Row]:
    """Measure every combination that was asked for."""
    rows = []
    memory = {queued: bytes_per_request(queued, options.group_size) for queued in options.queued}
    for queued, instances in product(options.queued, options.instances):
        start = perf_counter()
        load = SteadyLoad(queued, instances, options.group_size, options.seed)
        print(
            f"{queued} queued, {instances} instances: set up in {perf_counter() - start:.1f} s",
            file=sys.stderr,
        )
        for phase in ("probes", "groups"):
            if phase == "groups":
                load.abort_probes()
                load.submit(max(0, queued - load.scheduler.waiting) // options.group_size)
            load.run(options.warmup)
            for freeze in (False, True):
                row = {"queued": queued, "instances": instances, "phase": phase}
                row["gc"] = "frozen" if freeze else "default"
                row |= measure(load, options.events, options.rounds, freeze)
                row["bytes_per_request"] = memory[queued]
                rows.append(row)
        del load
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return one line for each configuration."""
    columns = [
        "queued",
        "instances",
        "phase",
        "gc",
        "us per event",
        "us per decision",
        "quiet",
        "p99",
        "slowest",
    ]
    lines = [
        [
            f"{row['queued']:,}",
            f"{row['instances']:,}",
            row["phase"],
            row["gc"],
            cell(row["event_us"]),
            cell(row["decision_us"]),
            *(f"{row[name]:,.1f}" for name in ("quiet_us", "p99_event_us", "slowest_event_us")),
            f"{row['bytes_per_request']:.0f}",
        ]
        for row in rows
    ]
    return markdown([*columns, "bytes per request"], lines)
