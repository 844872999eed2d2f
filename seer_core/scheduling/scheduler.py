"""The scheduler: pure decisions.  It takes an event and the time and returns commands.

One decision asks three strategies in turn: the prioritizer which request is next, the splitter how
many tokens its chunk may have, the placer where it runs.  The first refusal of the placer ends the
round; the next event starts another.

No request starves, under any prioritizer and any later arrivals: every ``STARVATION_INTERVAL``-th
chunk goes to the request that has waited longest, if the prioritizer's choice arrived after it.  So a
request waits for at most ``STARVATION_INTERVAL`` times the chunks that those before it, and with it, still
need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from operator import index
from typing import Any, Generic, Literal, TypeVar

import attrs
import msgspec

from seer_core.error_origin import describe_error, is_interruption, is_sentence, shown
from seer_core.errors import PluginError, SeerError, StalledError, TransitionError, name_of
from seer_core.model import WHOLE, FinishReason, InstanceStatus, Request
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
    GroupsSubmitted,
    InstanceDegraded,
    InstanceFailed,
    InstanceLeaving,
    InstanceLimited,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    InstanceWaiting,
    RequestsAborted,
    RolloutPaused,
    RolloutResumed,
)
from seer_core.ports.contracts import implemented
from seer_core.ports.policy import Placement, Placer, Prioritizer, Splitter
from seer_core.scheduling.buffer import ACTING, RUNNING, WAITING, RequestBuffer
from seer_core.scheduling.context import ContextManager
from seer_core.scheduling.defaults import FirstComeFirstServed, LeastLoaded, WholeRequests

__all__ = ["CORE", "STARVATION_INTERVAL", "Policies", "Scheduler", "Slot", "remedy_without"]

CORE = "seer-core"
"""Owner of a slot that no plug-in claims."""

STARVATION_INTERVAL = 32
"""Chunks of which one goes to the oldest request, if later arrivals would overtake it."""

NOTIFICATIONS = (
    *("tick", "instance_started", "instance_changed", "instance_lost"),
    *("chunk_ended", "turn_ended", "group_changed", "group_over"),
)
"""The optional methods of ``Strategy``."""

S = TypeVar("S")


@attrs.frozen
class Slot(Generic[S]):
    """A strategy and the plug-in it came from, so that errors can name it; ``inner`` is what it wraps."""

    name: str
    owner: str
    strategy: S
    inner: Slot[S] | None = None

    @property
    def links(self) -> list[Slot[S]]:
        """This slot and those that it wraps, the outermost first."""
        return [self, *(self.inner.links if self.inner is not None else ())]

    @contextmanager
    def named(self) -> Iterator[None]:
        """Turn an error of any other class into a ``PluginError`` that names the strategy's plug-in."""
        try:
            yield
        except BaseException as error:
            if is_sentence(error) or is_interruption(error):
                raise
            raise PluginError(
                f"plug-in {self.owner!r}, slot {self.name!r}: raised {describe_error(error, self.strategy)};"
                f" {remedy_without(self.name, self.owner)}"
            ) from error


def remedy_without(slot: str, owner: str) -> str:
    """Return the remedy that ends an error of a plug-in: how to run without it."""
    if slot == "engines":
        return "run without it: name another one in [seer].engine"
    return f"run without it: {'--set seer.kv_pool=none' if slot == 'kv_pool' else f'-p no:{owner}'}"


Notified = tuple[Slot[Any], Callable[..., None]]
"""A strategy with the optional method of it that is to be called."""


@attrs.frozen
class Policies:
    """The three deciding slots, filled; the defaults are the core's own."""

    splitter: Slot[Splitter] = attrs.Factory(lambda: Slot("splitter", CORE, WholeRequests()))
    prioritizer: Slot[Prioritizer] = attrs.Factory(lambda: Slot("prioritizer", CORE, FirstComeFirstServed()))
    placer: Slot[Placer] = attrs.Factory(lambda: Slot("placer", CORE, LeastLoaded()))

    @property
    def links(self) -> list[Slot[Any]]:
        """All strategies, those that are wrapped included."""
        return [*self.splitter.links, *self.prioritizer.links, *self.placer.links]


def _implementing(policies: Policies, method: str) -> list[Notified]:
    """Return the strategies that implement an optional method; an object in two slots comes once."""
    found: dict[int, Notified] = {}
    for slot in policies.links:
        if (call := implemented(slot.strategy, method)) is not None:
            found.setdefault(id(slot.strategy), (slot, call))
    return list(found.values())


OUT_OF_THEM = "return one of `instances` itself"


def _no_instance(answer: object, living: Mapping[str, InstanceStatus]) -> str:
    """Return, in a clause, what a placer answered in place of a living instance."""
    if isinstance(answer, InstanceStatus):
        if answer.id in living:
            return f"answered a copy of instance {answer.id!r}, or one from before its loss; {OUT_OF_THEM}"
        return f"answered instance {answer.id!r}, which is no longer alive"
    if isinstance(answer, str) and answer in living:
        return f"answered {answer!r}, an id; {OUT_OF_THEM}"
    return f"answered {shown(answer)}, which is no living instance"


class Scheduler:
    """Decides which request runs where and for how long; does nothing itself.

    ``max_failures`` chunks of one request may fail on living instances before it completes with
    reason ``error``.  While it is ``paused`` it sends no chunk.
    """

    def __init__(self, policies: Policies | None = None, max_failures: int = 3) -> None:
        self.policies = policies = policies or Policies()
        self.max_failures = max_failures
        self.buffer = RequestBuffer()
        self.contexts = ContextManager()
        self.instances: dict[str, InstanceStatus] = {}
        self.paused = False
        self._leaving: set[str] = set()
        self._living: tuple[InstanceStatus, ...] = ()
        self._instances_seen = 0
        self._now = 0.0
        self._to_oldest = STARVATION_INTERVAL - 1
        """How many chunks are sent before one goes to the oldest request."""
        self._notified = {method: _implementing(policies, method) for method in NOTIFICATIONS}
        self._ticks = self._notified["tick"]
        self._instance_changes = self._notified["instance_changed"]
        self._chunk_ends = self._notified["chunk_ended"]
        self.has_room: Callable[[], bool] | None = implemented(policies.placer.strategy, "has_room")
        """The placer's, if it implements that; where it answers False, no other chunk is sent."""
        self._to_end = implemented(policies.placer.strategy, "to_end")
        self._stage: Slot[Any] = self.policies.prioritizer
        self._subject: Request | None = None
        self._handlers: dict[type, Callable[[Any, list[Command]], None]] = {
            GroupsSubmitted: self._groups_submitted,
            InstanceStarted: self._instance_started,
            InstanceLeaving: self._instance_leaving,
            InstanceLimited: self._instance_limited,
            InstanceStopped: self._instance_lost,
            InstanceLost: self._instance_lost,
            InstanceReported: self._instance_reported,
            InstanceFailed: self._noted,
            InstanceWaiting: self._noted,
            InstanceDegraded: self._noted,
            ChunkFinished: self._chunk_finished,
            ChunkFailed: self._chunk_failed,
            EnvironmentAnswered: self._environment_answered,
            EnvironmentFailed: self._environment_failed,
            RequestsAborted: self._requests_aborted,
            RolloutPaused: self._pause,
            RolloutResumed: self._resume,
        }

    def handle(self, event: Event, now: float) -> list[Command]:
        """Take an event at time ``now`` (seconds) and return what is to be done, in order.

        Raises:
            PluginError: a strategy raised or answered what its Protocol does not allow.
            StalledError: requests wait, nothing runs, and the placer accepts no instance.
            TransitionError: the event does not fit the state of its request or instance.
        """
        handler = self._handlers[type(event)]
        commands: list[Command] = []
        self._subject = None
        self._now = now
        try:
            for slot, tick in self._ticks:
                self._stage = slot
                tick(now)
            handler(event, commands)
            if self._living and not self.paused:
                self._dispatch(commands)
                if self._to_end is not None:
                    self._stage = self.policies.placer
                    self._end_some(self._to_end(), commands)
            self._check_queue()
        except BaseException as error:
            if is_sentence(error) or is_interruption(error):
                raise
            raise self._attribute_error(f"raised {describe_error(error, self._stage.strategy)}") from error
        return commands

    def _notify(self, method: str, *what: Any) -> None:
        for slot, call in self._notified[method]:
            self._stage = slot
            call(*what)

    @property
    def waiting(self) -> int:
        """Requests that wait for a chunk."""
        return self.buffer.waiting

    def _dispatch(self, commands: list[Command]) -> None:
        splitter, placer = self.policies.splitter, self.policies.placer
        prioritizer = self.policies.prioritizer
        has_room, living = self.has_room, self._living
        while (request := self._next()) is not None:
            group = request.group
            self._stage = splitter
            most = group.max_tokens - request.generated_tokens
            tokens = most if group.whole else splitter.strategy.split(request)
            if type(tokens) is not int or not 1 <= tokens <= most:
                tokens = self._legal(tokens, most)
            self._stage = placer
            choice = placer.strategy.place(request, tokens, living)
            if choice is None:
                return
            instance, why, reserved, kept = choice, "", None, tokens
            if type(choice) is Placement:
                instance, why, reserved = choice.instance, choice.why, choice.reserved_tokens
                if not isinstance(why, str) or not why.isprintable():
                    raise self._attribute_error(
                        f"gives {shown(why)} for a reason; the `why` of a placement is a word"
                    )
                if reserved is not None:
                    if type(reserved) is not int or not 1 <= reserved <= tokens:
                        raise self._attribute_error(
                            f"reserves {shown(reserved)} of a chunk's {tokens} tokens; the"
                            f" `reserved_tokens` of a placement are 1 to {tokens}, or None for all"
                        )
                    kept = reserved
            if not isinstance(instance, InstanceStatus) or self.instances.get(instance.id) is not instance:
                raise self._attribute_error(_no_instance(instance, self.instances))
            self._stage = prioritizer
            prioritizer.strategy.take(request)
            instance_id = instance.id
            added = kv_tokens = instance.footprint(request, kept)
            if instance.info.shares_prompts:
                kv_tokens += instance.shared_kv_tokens(group)
            instance.running += 1
            instance.reserved_kv_tokens += added
            migrated = self.buffer.run(request, instance_id, tokens, kv_tokens)
            self._to_oldest = (self._to_oldest or STARVATION_INTERVAL) - 1
            for slot, instance_changed in self._instance_changes:
                self._stage = slot
                instance_changed(instance)
            commands.append(Dispatch(request.id, instance_id, tokens, kv_tokens, migrated, why, reserved))
            if has_room is not None:
                self._stage = placer
                if not has_room():
                    return

    def _next(self) -> Request | None:
        """Return the prioritizer's choice, or now and then who has been overtaken longest."""
        self._stage = prioritizer = self.policies.prioritizer
        self._subject = None
        request = prioritizer.strategy.peek()
        if request is None:
            return None
        if not isinstance(request, Request):
            raise self._attribute_error(f"offered {shown(request)}, which is no request")
        self._subject = request
        if request.state is not WAITING:
            raise self._attribute_error("offered a request that does not wait")
        if not self._to_oldest and self.contexts.oldest.arrived_s < request.group.arrived_s:
            oldest = self.buffer.oldest_waiting()
            if oldest.group.arrived_s < request.group.arrived_s:
                self._subject = request = oldest
        return request

    def _groups_submitted(self, event: GroupsSubmitted, commands: list[Command]) -> None:
        for spec in event.groups:
            group = self.contexts.open(spec, self._now)
            home = spec.home if spec.home in self.instances else None
            requests = self.buffer.add_group(group, [response.tokens for response in spec.resumed], home)
            for request in requests:
                self._push(request)
            for request, response in zip(requests, spec.resumed, strict=False):
                if response.finish_reason is not None:
                    self._take(request)
                    self._end(request, response.finish_reason, commands)
                elif response.acting:
                    self._take(request)
                    self._ask_environment(request, commands)

    def _instance_started(self, event: InstanceStarted, commands: list[Command]) -> None:
        if event.info.id in self.instances:
            raise TransitionError(f"instance {event.info.id!r} started while it was alive")
        instance = InstanceStatus(event.info, self._instances_seen)
        self._instances_seen += 1
        self.instances[instance.id] = instance
        self._living += (instance,)
        self._notify("instance_started", instance)
        self._notify("instance_changed", instance)

    def _noted(
        self, event: InstanceFailed | InstanceWaiting | InstanceDegraded, commands: list[Command]
    ) -> None:
        """Take in what no decision depends on."""

    def _instance_leaving(self, event: InstanceLeaving, commands: list[Command]) -> None:
        instance = self._instance(event.instance_id)
        self._leaving.add(instance.id)
        self._retire(instance)
        self.buffer.forget_instance(instance.id)
        self._end_chunks(instance.id, "instance_leaves", commands)

    def _instance_limited(self, event: InstanceLimited, commands: list[Command]) -> None:
        instance = self._instance(event.instance_id)
        instance.info = msgspec.structs.replace(instance.info, max_running=event.max_running)
        self._notify("instance_changed", instance)

    def _instance_lost(self, event: InstanceLost | InstanceStopped, commands: list[Command]) -> None:
        if event.instance_id in self._leaving:
            self._leaving.remove(event.instance_id)
        else:
            self._retire(self._instance(event.instance_id))
        for request in self.buffer.lose_instance(event.instance_id):
            self._push(request)

    def _retire(self, instance: InstanceStatus) -> None:
        """Place nothing on an instance any more."""
        del self.instances[instance.id]
        self._living = tuple(each for each in self._living if each is not instance)
        self._subject = None
        self._notify("instance_lost", instance)

    def _end_chunks(
        self, instance_id: str, reason: Literal["instance_leaves", "paused"], commands: list[Command]
    ) -> None:
        for request in self.buffer.on_instance.get(instance_id, ()):
            commands.append(EndChunk(request.id, instance_id, reason))

    def _end_some(self, requests: Iterable[Request], commands: list[Command]) -> None:
        """End the chunks of requests that the placer would rather have elsewhere, or later."""
        for request in requests:
            if not isinstance(request, Request) or request.state is not RUNNING:
                raise self._attribute_error(f"ends {shown(request)}, which is no running request")
            assert request.instance is not None
            commands.append(EndChunk(request.id, request.instance, "goes_on"))

    def _pause(self, event: RolloutPaused, commands: list[Command]) -> None:
        self.paused = True
        for instance_id in self.instances:
            self._end_chunks(instance_id, "paused", commands)

    def _resume(self, event: RolloutResumed, commands: list[Command]) -> None:
        self.paused = False

    def _instance_reported(self, event: InstanceReported, commands: list[Command]) -> None:
        instance = self._instance(event.instance_id)
        instance.reported_running = event.running
        instance.reported_waiting = event.waiting
        instance.reported_kv_usage = event.kv_usage
        self._notify("instance_changed", instance)

    def _chunk_finished(self, event: ChunkFinished, commands: list[Command]) -> None:
        request = self._running(event.request_id, event.instance_id)
        tokens, stopped = event.tokens, event.stopped
        if tokens == 0 and not stopped:
            raise TransitionError(
                f"instance {event.instance_id!r} finished a chunk of request {request.id!r} without a"
                f" token. {self.buffer.story(request)}"
            )
        self.buffer.absorb(request, tokens)
        group = request.group
        group.steps += event.steps
        if event.drafted:
            group.drafted += event.drafted
            group.accepted += event.accepted
        self._release(request, event)
        if stopped and group.turns:
            self._ask_environment(request, commands)
        elif stopped or request.generated_tokens >= group.max_tokens:
            self._end(request, "stop" if stopped else "length", commands)
        else:
            self._push(request)

    def _chunk_failed(self, event: ChunkFailed, commands: list[Command]) -> None:
        request = self._running(event.request_id, event.instance_id)
        self.buffer.give_back(request)
        self._release(request)
        request.failures += 1
        if request.failures > self.max_failures:
            self._end(request, "error", commands)
        else:
            self._push(request)

    def _ask_environment(self, request: Request, commands: list[Command]) -> None:
        self.buffer.act(request)
        commands.append(AskEnvironment(request.id))
        self._subject = request
        self._notify("turn_ended", request)

    def _environment_answered(self, event: EnvironmentAnswered, commands: list[Command]) -> None:
        request = self._acting(event.request_id)
        self.buffer.answer(request, event.tokens)
        if event.done or request.generated_tokens >= request.group.max_tokens:
            self._end(request, "stop" if event.done else "length", commands)
        else:
            self._push(request)

    def _environment_failed(self, event: EnvironmentFailed, commands: list[Command]) -> None:
        request = self._acting(event.request_id)
        self.buffer.answer(request, 0)
        self._end(request, "error", commands)

    def _requests_aborted(self, event: RequestsAborted, commands: list[Command]) -> None:
        for request_id in event.request_ids:
            request = self.buffer.get(request_id)
            if request is None:
                continue
            if request.state is RUNNING:
                assert request.instance is not None
                commands.append(Abort(request.id, request.instance))
                self.buffer.give_back(request)
                self._release(request)
            elif request.state is ACTING:
                self.buffer.answer(request, 0)
            else:
                self._take(request)
            self._end(request, "aborted", commands)

    def _push(self, request: Request) -> None:
        self._stage = prioritizer = self.policies.prioritizer
        self._subject = request
        prioritizer.strategy.push(request)

    def _take(self, request: Request) -> None:
        self._stage = prioritizer = self.policies.prioritizer
        self._subject = request
        prioritizer.strategy.take(request)

    def _end(self, request: Request, reason: FinishReason, commands: list[Command]) -> None:
        if reason in WHOLE:
            self.contexts.record_finished(request)
        self.buffer.finish(request)
        self.contexts.close(request)
        commands.append(Complete(request.id, reason))
        self._subject = request
        group = request.group
        self._notify("group_changed", group, request)
        if group.left == 0:
            self.buffer.forget_group(group)
            self._notify("group_over", group)

    def _release(self, request: Request, finished: ChunkFinished | None = None) -> None:
        """Give back what a chunk that was in flight has reserved, but a prompt only with its last request."""
        assert request.instance is not None
        instance = self.instances.get(request.instance)
        if instance is None:  # it leaves, with what it has reserved, and with its KV
            request.instance = None
            return
        for slot, chunk_ended in self._chunk_ends:
            self._stage = slot
            chunk_ended(request, instance, finished)
        instance.running -= 1
        instance.reserved_kv_tokens -= request.chunk_kv_tokens
        if instance.info.shares_prompts:
            instance.reserved_kv_tokens += instance.shared_kv_tokens(request.group)
        self._subject = request
        for slot, instance_changed in self._instance_changes:
            self._stage = slot
            instance_changed(instance)

    def _running(self, request_id: str, instance_id: str) -> Request:
        request = self.buffer.get_sent(request_id)
        if request is None or request.state is not RUNNING or request.instance != instance_id:
            request = self.buffer.get(request_id)
            raise TransitionError(
                f"instance {instance_id!r} answered for request {request_id!r}, which does not run there."
                + (f" {self.buffer.story(request)}" if request else "")
            )
        return request

    def _acting(self, request_id: str) -> Request:
        request = self.buffer.get(request_id)
        if request is None or request.state is not ACTING:
            raise TransitionError(
                f"an environment answered request {request_id!r}, which does not wait for an answer."
                + (f" {self.buffer.story(request)}" if request else "")
            )
        return request

    def _instance(self, instance_id: str) -> InstanceStatus:
        if instance_id not in self.instances:
            raise TransitionError(f"instance {instance_id!r} spoke, but it has not started")
        return self.instances[instance_id]

    def _check_queue(self) -> None:
        self._stage = prioritizer = self.policies.prioritizer
        self._subject, buffer = None, self.buffer
        held = len(prioritizer.strategy)
        if held != buffer.waiting:
            raise self._attribute_error(
                f"holds {held} requests where {self.waiting} wait; it lost or kept one"
            )
        if held and held == buffer.unfinished and self._living and not self.paused:
            raise self._stalled()

    def _legal(self, tokens: Any, most: int) -> int:
        """Return a splitter's answer as an int, if it is one of another type such as numpy's, and legal."""
        whole = 0
        if not isinstance(tokens, bool):
            with suppress(TypeError):
                whole = index(tokens)
        if not 1 <= whole <= most:
            kind = "" if type(tokens) is int else f", which is a {name_of(type(tokens))}"
            raise self._attribute_error(
                f"answered {shown(tokens)}{kind}; a chunk has 1 to {most} tokens here"
            )
        return whole

    def _attribute_error(self, what: str) -> PluginError:
        about = f" for request {self._subject.id!r}" if self._subject is not None else ""
        without = "" if self._stage.owner == CORE else f", or run without it: -p no:{self._stage.owner}"
        return PluginError(
            f"plug-in {self._stage.owner!r}, slot {self._stage.name!r}{about}: {what};"
            f" report it to its author{without}"
        )

    def _stalled(self) -> SeerError:
        """Return the error of requests that wait while nothing runs, and the remedy."""
        request = self._next()
        if request is None:
            return self._attribute_error(f"offers none of {self.waiting} waiting requests while nothing runs")
        tokens = self.policies.splitter.strategy.split(request)
        fits = [each for each in self._living if each.footprint(request, tokens) <= each.free_kv_tokens]
        remedy = (
            "a placer has to accept some instance for each request that fits while nothing runs"
            if fits and self.policies.placer.owner != CORE
            else "use smaller chunks or prompts, or give instances more KV"
        )
        room = ", ".join(
            f"{instance.id} has {instance.free_kv_tokens} of {instance.info.kv_capacity_tokens}"
            f" for {instance.footprint(request, tokens)}"
            for instance in self._living[:4]
        )
        return StalledError(
            f"{self.waiting} requests wait and nothing runs: plug-in {self.policies.placer.owner!r} places"
            f" no chunk of {tokens} tokens after {request.context_tokens} of request {request.id!r}"
            f" (KV tokens free: {room}); {remedy}"
        )
