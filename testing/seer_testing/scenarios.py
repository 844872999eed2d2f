"""Short scenarios that drive a strategy by hand, each step as the scheduler would."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from seer_core.model import ChunkRecord, Completion
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.model.events import (
    Command,
    Event,
    InstanceDegraded,
    InstanceFailed,
    InstanceLimited,
    InstanceReported,
    InstanceWaiting,
)
from seer_core.ports.policy import Prioritizer
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded
from seer_core.scheduling.scheduler import Policies, Slot
from seer_testing.harness import SchedulerHarness
from seer_testing.queue_harness import QueueHarness
from seer_testing.rollouts import FixedSplitter
from seer_testing.support import seeded_random

__all__ = ["every_event", "one_completion", "placement_scenario", "rollout_of", "slot"]

STEPS = 300
"""Steps of a random scenario."""


def slot(name: str, strategy: Any) -> Slot[Any]:
    """Fill a slot; its owner is named by its class, as its author names it."""
    return Slot(name, type(strategy).__name__, strategy)


def rollout_of(sizes: Sequence[int], *queues: Prioritizer) -> QueueHarness:
    """Return a rollout by hand in which the requests of groups of these sizes wait."""
    rollout = QueueHarness(*queues, max_tokens=50)
    for size in sizes:
        rollout.add(size)
    return rollout


def one_completion() -> Completion:
    """Return a response of three tokens in one chunk."""
    chunk = ChunkRecord("a", 3, 0.0, 1.0, 0, 10, 0, 0, 0)
    tokens, logprobs = Tokens([5, 6, 7]), Logprobs([-0.1, -0.2, -0.3])
    return Completion("g/0", "g", 0, 7, tokens, logprobs, "abc", "stop", 0, [chunk], ["a"], 1.0, {"task": 1})


def placement_scenario(rig: SchedulerHarness, check: Callable[[], None] = lambda: None) -> None:
    """Start, lose and drain instances, submit groups, finish chunks; ``check`` after each step."""
    rng = seeded_random()
    for number in range(STEPS):
        step = rng.random()
        if not rig.instances or (step < 0.1 and len(rig.instances) < 5):
            rig.start(f"i{number}", 16 * rng.randint(6, 20), rng.choice((1, 4, 16)), rng.randint(1, 4))
        elif step < 0.12:
            rig.lose(rng.choice(list(rig.instances)))
        elif step < 0.13:
            rig.leave(rng.choice(list(rig.instances)))
        elif step < 0.14 and rig.leaving:
            rig.stop(min(rig.leaving))
        elif step < 0.5 and rig.in_flight:
            request_id = rng.choice(list(rig.in_flight))
            rig.finish(request_id, stopped=step > 0.4 and rig.groups[request_id.rpartition("/")[0]].turns)
        elif step < 0.55 and rig.acting:
            request_id = min(rig.acting)
            group = rig.groups[request_id.rpartition("/")[0]]
            left = group.max_tokens - rig.generated[request_id]
            rig.answer(request_id, rng.randint(0, left), done=rng.random() < 0.3)
        else:
            tokens, prompt, turns = rng.randint(1, 60), rng.randint(1, 20), rng.random() < 0.3
            rig.group(f"g{number}", max_tokens=tokens, prompt=prompt, turns=turns)
        check()


def every_event() -> list[tuple[Event, list[Command]]]:
    """Return a short rollout in which each kind of event and command occurs."""
    rig = SchedulerHarness(
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
    rig.pause()
    rig.resume()
    rig.group("t", n=2, max_tokens=50, turns=True)
    rig.finish("t/0", stopped=True)
    rig.answer("t/0", 5)
    rig.finish("t/1", stopped=True)
    rig.fail_environment("t/1")
    rig.handle(InstanceLimited("a", 1, "a test"))
    rig.lose("b")
    rig.handle(InstanceWaiting("b", "a node with 1 GPU"))
    rig.handle(InstanceFailed("b", "a test took it"))
    rig.leave("a")
    rig.finish_all()
    rig.stop("a")
    return rig.seen
