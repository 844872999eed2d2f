"""A scheduler driven by hand, with books of its own, and strategies that are watched while it asks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import msgspec
from seer_session.guard import MutationGuard, guarded_policies

from seer_core.model import InstanceInfo
from seer_core.model.arrays import packed
from seer_core.model.events import (
    Abort,
    AskEnvironment,
    ChunkFailed,
    ChunkFinished,
    Command,
    Complete,
    Dispatch,
    EndChunk,
    EnvironmentAnswered,
    EnvironmentFailed,
    Event,
    GroupSpec,
    GroupsSubmitted,
    InstanceLeaving,
    InstanceLost,
    InstanceStarted,
    InstanceStopped,
    RequestsAborted,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.scheduling.scheduler import Policies, Scheduler

__all__ = ["DeterminismHarness", "SchedulerHarness", "guarded"]

S = TypeVar("S")

EVENT_S = 0.25
"""Time from one event to the next."""


class SchedulerHarness:
    """A scheduler, driven by hand, with books of its own that are compared after every event."""

    def __init__(self, policies: Policies | None = None, max_failures: int = 3) -> None:
        self.scheduler = Scheduler(guarded_policies(policies or Policies()), max_failures)
        self.broken = False
        self.now = 0.0
        self.groups: dict[str, GroupSpec] = {}
        self.generated: dict[str, int] = {}
        self.in_flight: dict[str, Dispatch] = {}
        self.acting: set[str] = set()
        self.completed: dict[str, str] = {}
        self.instances: dict[str, InstanceInfo] = {}
        self.leaving: set[str] = set()
        self.seen: list[tuple[Event, list[Command]]] = []

    def start(
        self, name: str, kv: int = 1000, block: int = 1, slots: int = 8, shares_prompts: bool = False
    ) -> list[Command]:
        """Start an instance with so many KV tokens, tokens per block, and slots."""
        info = InstanceInfo(name, kv, block, slots, kv, shares_prompts=shares_prompts)
        self.instances[name] = info
        return self.handle(InstanceStarted(info))

    def lose(self, name: str) -> list[Command]:
        """Lose an instance with all that is in flight there."""
        del self.instances[name]
        self.in_flight = {key: chunk for key, chunk in self.in_flight.items() if chunk.instance_id != name}
        return self.handle(InstanceLost(name, "a test took it"))

    def leave(self, name: str) -> list[Command]:
        """Let an instance leave; what is in flight there may still finish, until it is stopped."""
        del self.instances[name]
        self.leaving.add(name)
        return self.handle(InstanceLeaving(name, "a test drains it"))

    def stop(self, name: str) -> list[Command]:
        """Stop an instance, with all that is in flight there."""
        self.instances.pop(name, None)
        self.leaving.discard(name)
        self.in_flight = {key: chunk for key, chunk in self.in_flight.items() if chunk.instance_id != name}
        return self.handle(InstanceStopped(name))

    def pause(self) -> list[Command]:
        """Send no chunk until ``resume``."""
        return self.handle(RolloutPaused())

    def resume(self) -> list[Command]:
        """Send chunks again."""
        return self.handle(RolloutResumed())

    def submit(self, *groups: GroupSpec) -> list[Command]:
        """Submit groups in one event."""
        for group in groups:
            self.groups[group.id] = group
            self.generated |= {f"{group.id}/{index}": 0 for index in range(group.n)}
            self.generated |= {f"{group.id}/{i}": each.tokens for i, each in enumerate(group.resumed)}
        return self.handle(GroupsSubmitted(groups))

    def group(
        self, name: str, n: int = 1, max_tokens: int = 100, prompt: int = 10, turns: bool = False
    ) -> list[Command]:
        """Submit one group with a prompt of ``prompt`` tokens; with ``turns`` it has an environment."""
        return self.submit(GroupSpec(name, prompt, n, max_tokens, turns=turns))

    def finish(self, request_id: str, tokens: int | None = None, stopped: bool = False) -> list[Command]:
        """Finish a chunk, by default with all its tokens."""
        chunk = self.in_flight.pop(request_id)
        tokens = chunk.max_tokens if tokens is None else tokens
        self.generated[request_id] += tokens
        return self.handle(ChunkFinished(request_id, chunk.instance_id, tokens, stopped))

    def fail(self, request_id: str) -> list[Command]:
        """Give a chunk back without a result."""
        chunk = self.in_flight.pop(request_id)
        return self.handle(ChunkFailed(request_id, chunk.instance_id, "a test failed it"))

    def answer(self, request_id: str, tokens: int = 1, done: bool = False) -> list[Command]:
        """Answer a turn with so many tokens."""
        self.acting.remove(request_id)
        self.generated[request_id] += tokens
        return self.handle(EnvironmentAnswered(request_id, tokens, done))

    def fail_environment(self, request_id: str) -> list[Command]:
        """Let the environment fail on a turn."""
        self.acting.remove(request_id)
        return self.handle(EnvironmentFailed(request_id, "a test failed it"))

    def abort(self, request_id: str) -> list[Command]:
        """Abort a request, wherever it is."""
        return self.handle(RequestsAborted((request_id,)))

    def finish_all(self) -> None:
        """Finish chunks until none is in flight."""
        while self.in_flight:
            self.finish(next(iter(self.in_flight)))

    def handle(self, event: Event) -> list[Command]:
        """Pass an event on, keep book of the commands, compare."""
        try:
            return self._handle(event)
        except BaseException:
            self.broken = True
            raise

    def _handle(self, event: Event) -> list[Command]:
        self.now += EVENT_S
        commands = self.scheduler.handle(event, self.now)
        self.seen.append((event, commands))
        for command in commands:
            match command:
                case Dispatch():
                    self._dispatched(command)
                case Complete():
                    assert command.request_id not in self.in_flight, "completed while in flight"
                    assert command.request_id not in self.completed, "completed twice"
                    self.acting.discard(command.request_id)  # it was aborted
                    self.completed[command.request_id] = command.finish_reason
                case AskEnvironment():
                    assert command.request_id in self.generated, "asked about, but never submitted"
                    assert command.request_id not in self.in_flight, "asked about while in flight"
                    assert command.request_id not in self.acting, "asked about twice"
                    self.acting.add(command.request_id)
                case Abort():
                    chunk = self.in_flight.pop(command.request_id)
                    assert chunk.instance_id == command.instance_id
                case EndChunk():
                    assert self.in_flight[command.request_id].instance_id == command.instance_id
        self.check()
        return commands

    def _dispatched(self, chunk: Dispatch) -> None:
        assert chunk.request_id in self.generated, "dispatched, but never submitted"
        assert chunk.request_id not in self.in_flight, "dispatched twice"
        assert chunk.request_id not in self.acting, "dispatched while its environment works"
        assert chunk.request_id not in self.completed, "dispatched after completion"
        group = self.groups[chunk.request_id.rpartition("/")[0]]
        generated = self.generated[chunk.request_id]
        assert not self.scheduler.paused, "dispatched while paused"
        assert 1 <= chunk.max_tokens <= group.max_tokens - generated
        block = self.instances[chunk.instance_id].block_tokens
        reserved = chunk.max_tokens if chunk.reserved_tokens is None else chunk.reserved_tokens
        assert 1 <= reserved <= chunk.max_tokens
        end = group.prompt_tokens + generated + reserved
        assert end <= chunk.kv_tokens < end + block
        assert chunk.kv_tokens % block == 0
        self.in_flight[chunk.request_id] = chunk

    def check(self) -> None:
        """Nothing lost, nothing twice, accounts equal a recount."""
        scheduler = self.scheduler
        assert set(scheduler.instances) == set(self.instances)
        for name, status in scheduler.instances.items():
            here = [chunk for chunk in self.in_flight.values() if chunk.instance_id == name]
            assert status.running == len(here)
            assert status.reserved_kv_tokens == self._needed(name, here)
            running = {request.id for request in scheduler.buffer.on_instance.get(name, ())}
            assert running == {chunk.request_id for chunk in here}
        for request in scheduler.buffer:
            there = request.id in self.in_flight or request.instance not in self.leaving
            assert there, "it waits, and counts on KV of an instance that leaves"
        unfinished = set(self.generated) - set(self.completed)
        assert {request.id for request in scheduler.buffer} == unfinished
        assert all(request.generated_tokens == self.generated[request.id] for request in scheduler.buffer)
        assert scheduler.buffer.running == len(self.in_flight)
        assert scheduler.buffer.acting == len(self.acting)
        assert scheduler.waiting == len(unfinished) - len(self.in_flight) - len(self.acting)
        assert len(scheduler.policies.prioritizer.strategy) == scheduler.waiting
        open_groups = {request_id.rpartition("/")[0] for request_id in unfinished}
        assert {context.id for context in scheduler.contexts} == open_groups

    def _needed(self, name: str, here: list[Dispatch]) -> int:
        """Return the KV tokens of the chunks on an instance, with each prompt that is shared counted once."""
        needed = sum(chunk.kv_tokens for chunk in here)
        info = self.instances[name]
        if info.shares_prompts:
            groups = [chunk.request_id.rpartition("/")[0] for chunk in here]
            for group in set(groups):
                prompt = (self.groups[group].prompt_tokens - 1) // info.block_tokens * info.block_tokens
                needed -= (groups.count(group) - 1) * prompt
        return needed


class DeterminismHarness(SchedulerHarness):
    """A rig with a second scheduler, whose strategies are made alike and have to decide the same.

    It asks its placer also where that has no room, so that room which is denied wrongly is found.
    """

    def __init__(self, make: Callable[[], Policies], max_failures: int = 3) -> None:
        super().__init__(make(), max_failures)
        self.twin = Scheduler(guarded_policies(make()), max_failures)
        self.twin.has_room = None

    def _handle(self, event: Event) -> list[Command]:
        commands = super()._handle(event)
        assert commands == self.twin.handle(event, self.now), (
            f"after {event}, strategies made alike decided differently on the same events; take nothing from"
            " clocks, chance, or the order of sets"
        )
        return commands


class _Unchanging(MutationGuard):
    """A strategy whose calls have to leave lists, events and commands as they were, too."""

    def _call(self, name: str, *arguments: Any) -> Any:
        before = [_look(argument) for argument in arguments]
        answer = super()._call(name, *arguments)
        for argument, then in zip(arguments, before, strict=True):
            now = _look(argument)
            assert now == then, f"{name}() changed what it was given, from {then} to {now}"
        return answer


def guarded(slot: str, strategy: S) -> S:
    """Return ``strategy`` behind a guard: a call that changes what it was ever given raises.

    Raises:
        PluginError, AssertionError: from the call.
    """
    return cast("S", _Unchanging(type(strategy).__name__, [slot], strategy))


def _look(value: Any) -> Any:
    """Return what can be seen of an argument and is not guarded, to be compared later."""
    if isinstance(value, list | tuple):
        return [_look(each) for each in value]
    return msgspec.msgpack.encode(value, enc_hook=packed) if isinstance(value, msgspec.Struct) else value
