"""What a scheduling decision costs: the scheduler with divided_rollout and context_sched, no engines.

The load holds its size: a random chunk in flight ends, the scheduler handles that and sends new ones,
and a fresh group is submitted, unmeasured, whenever one's worth of requests has finished.  It is
measured in two phases: while every group's probe waits, and after all first probes have been aborted,
when groups compete by estimate.  Lengths are log-normal and alike within a group.
"""

from __future__ import annotations

import argparse
import cProfile
import gc
import json
import platform
import pstats
import random
import shlex
import statistics
import sys
import tracemalloc
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from time import perf_counter, thread_time_ns
from typing import Any

import attrs
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware

from seer_core.events import (
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
from seer_core.model import InstanceInfo
from seer_core.scheduler import Policies, Scheduler, Slot

CHUNK_TOKENS = 2048
GUARD_INTERVAL = 32
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
            Slot("prioritizer", "context_sched", ContextAware(GUARD_INTERVAL)),
            Slot("placer", "divided_rollout", KvAware(STAY_KV_FRACTION)),
        )
    )


def make_groups(first: int, count: int, size: int) -> tuple[GroupSpec, ...]:
    """Return ``count`` groups of ``size`` requests, numbered from ``first``."""
    return tuple(
        GroupSpec(f"group-{k}", PROMPT_TOKENS, size, MAX_TOKENS) for k in range(first, first + count)
    )


class Load:
    """A scheduler under a steady load; holds the true lengths and what is in flight."""

    def __init__(self, queued: int, instances: int, group_size: int, seed: int) -> None:
        self.random = random.Random(seed)
        self.scheduler = make_scheduler()
        self.group_size = group_size
        self.groups = 0
        self.finished = 0
        self.lengths = array("l")
        self.flights: list[Dispatch] = []
        self.where: dict[str, int] = {}
        for k in range(instances):
            info = InstanceInfo(f"instance-{k}", KV_TOKENS, BLOCK_TOKENS, MAX_RUNNING, MAX_TOKENS * 2)
            self.carry_out(self.scheduler.handle(InstanceStarted(info), 0.0))
        self.submit(-(-(queued + instances * MAX_RUNNING) // group_size))

    def submit(self, count: int) -> None:
        """Hand in new groups."""
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
        flight = self.flights[self.random.randrange(len(self.flights))]
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
                    self.where[command.request_id] = len(self.flights)
                    self.flights.append(command)
                    decisions += 1
                case Complete():
                    self.finished += 1
                case Abort():
                    self.drop(command.request_id)
        return decisions

    def drop(self, request_id: str) -> None:
        """Forget a chunk in flight; the last one takes its place."""
        k, last = self.where.pop(request_id), self.flights.pop()
        if last.request_id != request_id:
            self.flights[k] = last
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
    """Hide what exists from the garbage collector for a while."""
    gc.collect()
    if freeze:
        gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def measure(load: Load, events: int, repeat: int, freeze: bool) -> dict[str, Any]:
    """Return microseconds per event and per decision: the median of the repeats, and their spread.

    ``us_quiet`` is per decision in the fastest twentieth of slices of 500 events: what remains when
    neighbours on the machine, and the garbage collector, leave us alone.
    """
    per_event, per_decision, slowest, p99, slices = [], [], [], [], []
    with frozen(freeze):
        for _ in range(repeat):
            times, decisions = load.run(events)
            per_event.append(sum(times) / events / 1e3)
            per_decision.append(sum(times) / max(sum(decisions), 1) / 1e3)
            for k in range(0, events, SLICE):
                slices.append(sum(times[k : k + SLICE]) / max(sum(decisions[k : k + SLICE]), 1) / 1e3)
            slowest.append(max(times) / 1e3)
            p99.append(sorted(times)[int(events * 0.99)] / 1e3)
    return {
        "us_per_event": round(statistics.median(per_event), 2),
        "us_per_decision": round(statistics.median(per_decision), 2),
        "us_per_decision_min": round(min(per_decision), 2),
        "us_per_decision_max": round(max(per_decision), 2),
        "us_quiet": round(sorted(slices)[len(slices) // 20], 2),
        "us_p99_event": round(statistics.median(p99), 1),
        "us_slowest_event": round(max(slowest), 1),
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


def benchmark(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every combination that was asked for; print rows as they come."""
    rows = []
    memory = {}
    for queued in arguments.queued:
        progress(f"memory of {queued} queued requests ...")
        memory[queued] = round(bytes_per_request(queued, arguments.group_size))
    print(HEADER)
    for queued, instances in product(arguments.queued, arguments.instances):
        start = perf_counter()
        load = Load(queued, instances, arguments.group_size, arguments.seed)
        progress(f"{queued} queued, {instances} instances: set up in {perf_counter() - start:.1f} s")
        for phase in ("probes", "groups"):
            if phase == "groups":
                load.abort_probes()
                load.submit(max(0, queued - load.scheduler.waiting) // arguments.group_size)
            load.run(arguments.warmup)
            for freeze in (False, True):
                row = attrs.asdict(Configuration(queued, instances, phase, "frozen" if freeze else "default"))
                row |= measure(load, arguments.events, arguments.repeat, freeze)
                row["in_flight"] = load.scheduler.buffer.running
                row["bytes_per_request"] = memory[queued]
                rows.append(row)
                print(ROW.format(**row), flush=True)
        del load
    return rows


@attrs.frozen
class Configuration:
    """What a row is about; ``queued`` requests wait beside those in flight."""

    queued: int
    instances: int
    phase: str
    gc: str


HEADER = """\
| queued | instances | in flight | phase | gc | us/event | us/decision (range) | quiet | p99 | max | bytes |
|---:|---:|---:|---|---|---:|---:|---:|---:|---:|---:|"""
ROW = (
    "| {queued} | {instances} | {in_flight} | {phase} | {gc} | {us_per_event}"
    " | {us_per_decision} ({us_per_decision_min}-{us_per_decision_max})"
    " | {us_quiet} | {us_p99_event} | {us_slowest_event} | {bytes_per_request} |"
)


def profile(arguments: argparse.Namespace) -> None:
    """Print where the time of the last configuration goes."""
    load = Load(arguments.queued[-1], arguments.instances[-1], arguments.group_size, arguments.seed)
    load.run(arguments.warmup)
    profiler = cProfile.Profile()
    handle = load.scheduler.handle
    for _ in range(arguments.events):
        event = load.next_event()
        commands = profiler.runcall(handle, event, 0.0)
        load.carry_out(commands)
    pstats.Stats(profiler).sort_stats("tottime").print_stats(25)


def progress(text: str) -> None:
    """Tell the user what happens."""
    print(text, file=sys.stderr, flush=True)


def parse(argv: list[str]) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="example:\n  python benchmarks/scheduler.py --queued 10000 --instances 100 --json rows.json",
    )
    parser.add_argument("--queued", type=int, nargs="+", default=[10_000, 100_000, 1_000_000])
    parser.add_argument("--instances", type=int, nargs="+", default=[10, 100, 1000])
    parser.add_argument("--events", type=int, default=20_000, help="measured events per repeat")
    parser.add_argument("--warmup", type=int, default=20_000, help="events before each phase is measured")
    parser.add_argument("--repeat", type=int, default=3, help="the median of so many is reported")
    parser.add_argument("--group-size", type=int, default=8, help="responses per prompt")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file, too")
    parser.add_argument("--profile", action="store_true", help="profile the last configuration instead")
    return parser.parse_args(argv)


def main(argv: list[str]) -> None:
    """Run the benchmark."""
    arguments = parse(argv)
    command = shlex.join(["python", "benchmarks/scheduler.py", *argv])
    if arguments.profile:
        profile(arguments)
        return
    rows = benchmark(arguments)
    machine = f"{platform.python_implementation()} {platform.python_version()}, {cpu()}"
    print(f"\nCPU time of `handle` in microseconds; bytes per queued request by tracemalloc. {machine}")
    print(f"reproduce: {command}")
    if arguments.json:
        report = {"command": command, "machine": machine, "events": arguments.events, "rows": rows}
        arguments.json.write_text(json.dumps(report, indent=1) + "\n")


def cpu() -> str:
    """Return the processor's name."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "unknown CPU")


if __name__ == "__main__":
    main(sys.argv[1:])
