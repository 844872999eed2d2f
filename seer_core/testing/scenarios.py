"""Short stories to tell a strategy by hand, each step as the scheduler would."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Sequence
from itertools import count
from typing import Any

from seer_core.model import ChunkRecord, Completion, GroupContext, InstanceInfo, InstanceStatus, Request
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import Command, Event, InstanceDegraded, InstanceFailed, InstanceReported
from seer_core.ports.contracts import implemented
from seer_core.ports.policy import Placement, Placer, Prioritizer
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded
from seer_core.scheduling.readonly import make_read_only
from seer_core.scheduling.scheduler import Policies, Slot
from seer_core.testing.harness import SchedulerHarness
from seer_core.testing.rollouts import FixedSplitter
from seer_core.testing.support import seeded_random

__all__ = [
    "PlacerHarness",
    "drain",
    "end",
    "every_event",
    "new_requests",
    "one_completion",
    "placement_scenario",
    "push_all",
    "queue_scenario",
    "slot",
]

STEPS = 300
"""Steps of a story told to two."""


def slot(name: str, strategy: Any) -> Slot[Any]:
    """Fill a slot; its owner is named as authors know it."""
    return Slot(name, type(strategy).__name__, strategy)


def new_requests(*sizes: int, numbers: Iterable[int] | None = None) -> list[Request]:
    """Return the requests of groups of these sizes, all waiting."""
    numbers = iter(count() if numbers is None else numbers)
    requests = []
    for size in sizes:
        number = next(numbers)
        lengths = tuple(5 + 11 * i % 45 for i in range(size))
        group = GroupContext(f"g{number}", number, size, 10, 50, lengths, left=size)
        make_read_only(group)
        requests += [Request(f"{group.id}/{i}", number * 100 + i, i, group) for i in range(size)]
    make_read_only(*requests)
    return requests


def one_completion() -> Completion:
    """Return a response of three tokens in one chunk."""
    chunk = ChunkRecord("a", 3, 0.0, 1.0, 0, 10, 0, 0, 0)
    tokens, logprobs = Tokens([5, 6, 7]), Logprobs([-0.1, -0.2, -0.3])
    return Completion("g/0", "g", 0, 7, tokens, logprobs, "abc", "stop", 0, [chunk], ["a"], 1.0, {"task": 1})


def push_all(queue: Prioritizer, requests: Sequence[Request]) -> None:
    """Push requests; the queue's length has to follow."""
    before = len(queue)
    for number, request in enumerate(requests, 1):
        queue.push(request)
        assert len(queue) == before + number, f"has length {len(queue)} when {before + number} wait"


def end(queue: Prioritizer, request: Request, learn: bool = False) -> None:
    """End a request that does not wait, as the scheduler would."""
    group = request.group
    if learn:
        group.finished += 1
        group.longest_finished_tokens = max(group.longest_finished_tokens, request.generated_tokens)
    group.left -= 1
    group_changed = implemented(queue, "group_changed")
    if group_changed is not None:
        group_changed(group, request)


def drain(queue: Prioritizer, waiting: Sequence[Request], tell: bool = True) -> list[Request]:
    """Serve until nobody is offered; each that waits has to be served once.  ``tell``: each is over then."""
    left = {request.id: request for request in waiting}
    served = []
    while (request := queue.peek()) is not None:
        assert isinstance(request, Request), f"offered {request!r}, which is no request"
        assert left.pop(request.id, None) is request, f"offered {request.id!r}, which does not wait"
        queue.take(request)
        served.append(request)
        assert len(queue) == len(left), f"has length {len(queue)} when {len(left)} wait"
        if tell:
            end(queue, request, learn=True)
    assert not left, f"offers nobody while {', '.join(left)} wait"
    return served


def queue_scenario(queue: Prioritizer) -> list[str | None]:
    """Tell a queue of what happens in a rollout and return whom it offered."""
    rng = seeded_random()
    numbers = count()
    waiting: list[Request] = []
    running: list[Request] = []
    offered: list[str | None] = []
    for _ in range(STEPS):
        step = rng.random()
        if step < 0.1 or not (waiting or running):
            new = new_requests(rng.randint(1, 4), numbers=numbers)
            push_all(queue, new)
            waiting += new
        elif step < 0.6 and (request := queue.peek()) is not None:
            queue.take(request)
            waiting.remove(request)
            running.append(request)
        elif running:
            request = running.pop(rng.randrange(len(running)))
            request.generated_tokens += rng.randint(0, 9)
            if rng.random() < 0.3:
                end(queue, request, learn=True)
            else:
                queue.push(request)
                waiting.append(request)
        request_or_none = queue.peek()
        offered.append(None if request_or_none is None else request_or_none.id)
    return offered


class PlacerHarness:
    """Instances and the chunks on them; tells a placer of every change, as the scheduler does."""

    def __init__(self, placer: Placer) -> None:
        self.placer = placer
        self.instances: list[InstanceStatus] = []
        self.chunks: list[tuple[InstanceStatus, int, GroupContext]] = []
        self.seen: list[weakref.ref[GroupContext]] = []
        self.started = self.requests = 0

    def start(
        self, name: str | None = None, kv: int = 160, block: int = 16, slots: int = 4
    ) -> InstanceStatus:
        """Start an instance with so many KV tokens, tokens per block, and slots."""
        info = InstanceInfo(name or f"i{self.started}", kv, block, slots, kv)
        instance = InstanceStatus(info, self.started)
        make_read_only(instance)
        self.started += 1
        self.instances.append(instance)
        self._notify("instance_changed", instance)
        return instance

    def lose(self, instance: InstanceStatus) -> None:
        """Lose an instance with all chunks on it."""
        self.instances.remove(instance)
        self.chunks = [chunk for chunk in self.chunks if chunk[0] is not instance]
        self._notify("instance_lost", instance)

    def place(self, prompt: int = 10, tokens: int = 20, home: str | None = None) -> InstanceStatus | None:
        """Offer a chunk of a new request that has run on ``home`` before; book it where it is placed."""
        group = GroupContext(f"g{self.requests}", self.requests, 1, prompt, 60, left=1)
        request = Request(f"{group.id}/0", self.requests, 0, group, instance=home)
        make_read_only(group, request)
        self.seen.append(weakref.ref(group))
        self.requests += 1
        choice = self.placer.place(request, tokens, self.instances)
        instance = choice.instance if isinstance(choice, Placement) else choice
        if instance is None:
            return None
        assert any(instance is one for one in self.instances), f"answered {instance!r}, not one of the living"
        self._load(instance, 1, instance.footprint(request, tokens))
        self.chunks.append((instance, instance.footprint(request, tokens), group))
        return instance

    def end(self, number: int) -> None:
        """End a chunk, and with it its group."""
        instance, kv_tokens, group = self.chunks.pop(number)
        self._load(instance, -1, -kv_tokens)
        group.left = 0
        self._notify("group_over", group)

    def _notify(self, method: str, about: InstanceStatus | GroupContext) -> None:
        call = implemented(self.placer, method)
        if call is not None:
            call(about)

    def _load(self, instance: InstanceStatus, running: int, kv_tokens: int) -> None:
        instance.running += running
        instance.reserved_kv_tokens += kv_tokens
        self._notify("instance_changed", instance)


def placement_scenario(fleet: PlacerHarness) -> list[str | None]:
    """Tell a placer of what happens in a rollout and return what it chose."""
    rng = seeded_random()
    chosen: list[str | None] = []
    for _ in range(STEPS):
        step = rng.random()
        if not fleet.instances or (step < 0.1 and len(fleet.instances) < 5):
            fleet.start(None, 16 * rng.randint(6, 20), rng.choice((1, 4, 16)), rng.randint(1, 4))
        elif step < 0.13:
            fleet.lose(rng.choice(fleet.instances))
        elif step < 0.5 and fleet.chunks:
            fleet.end(rng.randrange(len(fleet.chunks)))
        else:
            home = rng.choice((None, *(instance.id for instance in fleet.instances)))
            instance = fleet.place(rng.randint(1, 20), rng.randint(1, 60), home)
            chosen.append(None if instance is None else instance.id)
    return chosen


def every_event() -> list[tuple[Event, list[Command]]]:
    """Return a short rollout in which each kind of event and command occurs."""
    seen: list[tuple[Event, list[Command]]] = []

    class Noting(SchedulerHarness):
        def handle(self, event: Event) -> list[Command]:
            commands = super().handle(event)
            seen.append((event, commands))
            return commands

    rig = Noting(
        Policies(
            slot("splitter", FixedSplitter(20)),
            slot("prioritizer", FirstComeFirstServed()),
            slot("placer", LeastLoaded()),
        )
    )
    rig.start("a")
    rig.start("b")
    rig.group("g", n=4, max_tokens=50)
    rig.finish("g/0")
    rig.fail("g/1")
    rig.handle(InstanceReported("a", 2, 0, 0.5, 1.0, 0.1, {"tokens": 3.0}))
    rig.handle(InstanceDegraded("b", "drafting", "its server is gone"))
    rig.abort("g/2")
    rig.lose("b")
    rig.handle(InstanceFailed("b", "a test took it"))
    rig.finish_all()
    rig.stop("a")
    return seen
