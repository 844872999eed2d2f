"""Skeletons of plug-ins that decide or watch: templates, each with its tests."""

__all__ = [
    "OBSERVER",
    "OBSERVER_TESTS",
    "PLACER",
    "PLACER_TESTS",
    "PRIORITIZER",
    "PRIORITIZER_TESTS",
    "SPLITTER",
    "SPLITTER_TESTS",
]

SPLITTER = '''
"""$title."""

from typing import Annotated

from msgspec import Meta, Struct
from seer_core.hookspecs import hookimpl
from seer_core.model import Request


class Settings(Struct, frozen=True):
    """``[plugin.$name]``: a chunk is ``factor`` times the one before."""

    first_tokens: Annotated[int, Meta(ge=1)] = 256
    factor: Annotated[int, Meta(ge=1)] = 2


class $strategy:
    """Splitter whose chunks grow."""

    def __init__(self, first_tokens: int, factor: int) -> None:
        self.first_tokens = first_tokens
        self.factor = factor

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``."""
        tokens: int = self.first_tokens * self.factor**request.chunks
        return min(tokens, request.remaining_tokens)


@hookimpl
def seer_make_splitter(settings: Settings) -> $strategy:
    """Fill the slot."""
    return $strategy(settings.first_tokens, settings.factor)
'''

SPLITTER_TESTS = """
from seer_core.testing import SplitterContract

from $package import $strategy

pytest_plugins = ["seer_core.testing.lab"]


class Test$strategy(SplitterContract):
    def make(self):
        return $strategy(first_tokens=8, factor=2)


def test_chunks_grow(lab):
    settings = {"$name": {"first_tokens": 8}}
    result = lab.run(["$name"], settings=settings)
    for completion in result.completions:
        chunks = [chunk.tokens for chunk in completion.chunks]
        assert chunks[:-1] == [8 * 2**number for number in range(len(chunks) - 1)]
"""

PRIORITIZER = '''
"""$title."""

from heapq import heappop, heappush

from seer_core.hookspecs import hookimpl
from seer_core.model import GroupContext, Request


class $strategy:
    """Prioritizer by tokens left; ties by arrival.  A decision costs O(log n) over n waiting requests."""

    def __init__(self) -> None:
        self._waiting: dict[int, Request] = {}
        self._heap: list[tuple[int, int]] = []

    def push(self, request: Request) -> None:
        """Take a waiting request."""
        self._waiting[request.seq] = request
        heappush(self._heap, (request.remaining_tokens, request.seq))

    def peek(self) -> Request | None:
        """Return the next request; entries of those taken meanwhile are dropped when they come up."""
        while self._heap:
            left, seq = self._heap[0]
            request = self._waiting.get(seq)
            if request is not None and request.remaining_tokens == left:
                return request
            heappop(self._heap)
        return None

    def take(self, request: Request) -> None:
        """Remove a waiting request."""
        del self._waiting[request.seq]

    def group_changed(self, group: GroupContext, request: Request) -> None:
        """Learn that a response of the group is over; this order does not depend on it."""

    def __len__(self) -> int:
        return len(self._waiting)


@hookimpl
def seer_make_prioritizer() -> $strategy:
    """Fill the slot."""
    return $strategy()
'''

PRIORITIZER_TESTS = """
from seer_core.model import PromptGroup
from seer_core.testing import PrioritizerContract

from $package import $strategy

pytest_plugins = ["seer_core.testing.lab"]


class Test$strategy(PrioritizerContract):
    def make(self):
        return $strategy()


def test_the_request_with_the_fewest_tokens_left_is_served_first(lab):
    groups = [PromptGroup(id=str(most), prompt_token_ids=(1, 2), n=1, max_tokens=most) for most in (9, 3, 6)]
    result = lab.run(["$name"], groups, instances=1, max_running=1)
    assert result.order == ["3/0", "6/0", "9/0"]
"""

PLACER = '''
"""$title."""

from collections.abc import Sequence

from seer_core.hookspecs import hookimpl
from seer_core.model import InstanceStatus, Request


class $strategy:
    """Placer by free KV, among the instances whose batch has a slot and whose KV holds the whole chunk."""

    def instance_changed(self, instance: InstanceStatus) -> None:
        """Learn that an instance has started or that its load has changed; it is looked at when placing."""

    def instance_lost(self, instance: InstanceStatus) -> None:
        """Forget an instance; nothing is kept of it."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the instance for this chunk, or None to keep it waiting."""
        fit = [
            instance
            for instance in instances
            if instance.free_slots > 0
            and instance.footprint(request, chunk_tokens) <= instance.free_kv_tokens
        ]
        return max(fit, key=lambda instance: (instance.free_kv_tokens, -instance.seq), default=None)


@hookimpl
def seer_make_placer() -> $strategy:
    """Fill the slot."""
    return $strategy()
'''

PLACER_TESTS = """
from seer_core.testing import PlacerContract

from $package import $strategy

pytest_plugins = ["seer_core.testing.lab"]


class Test$strategy(PlacerContract):
    def make(self):
        return $strategy()


def test_all_instances_work_and_none_preempts(lab):
    result = lab.run(["$name"], instances=3)
    busy = {name for completion in result.completions for name in completion.instances}
    assert busy == {"sim-0", "sim-1", "sim-2"}
    assert result.preemptions == 0
"""

OBSERVER = '''
"""$title."""

from collections import Counter
from collections.abc import Sequence

from seer_core.events import Command, Complete, Dispatch, Event
from seer_core.hookspecs import hookimpl


class $strategy:
    """Observer that counts what was dispatched to whom, and how responses ended."""

    def __init__(self) -> None:
        self.chunks: Counter[str] = Counter()
        self.finish_reasons: Counter[str] = Counter()

    def observe(self, now: float, event: Event, commands: Sequence[Command]) -> None:
        """Take note of an event at ``now`` seconds and of the commands it led to."""
        for command in commands:
            if isinstance(command, Dispatch):
                self.chunks[command.instance_id] += 1
            elif isinstance(command, Complete):
                self.finish_reasons[command.finish_reason] += 1


@hookimpl
def seer_make_observer() -> $strategy:
    """Fill the slot, beside others."""
    return $strategy()
'''

OBSERVER_TESTS = """
from seer_core.testing import ObserverContract

from $package import $strategy

pytest_plugins = ["seer_core.testing.lab"]


class Test$strategy(ObserverContract):
    def make(self):
        return $strategy()


def test_it_counts_every_chunk_and_every_response(lab):
    result, counts = lab.run(["$name"]), $strategy()
    for record in result.trace:
        counts.observe(record.now, record.event, record.commands)
    assert counts.chunks.total() == result.summary.chunks
    assert counts.finish_reasons == result.summary.finish_reasons
"""
