"""Contracts of the Protocols in ``seer_core.ports.policy``: splitter, prioritizer, placer, observer."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable

import hypothesis.strategies as st
import msgspec
from hypothesis import given

from seer_core.errors import StalledError
from seer_core.model import GroupContext, Request
from seer_core.model.arrays import packed
from seer_core.ports.contracts import implemented
from seer_core.ports.kv import PoolStats
from seer_core.ports.policy import Observer, Placer, Prioritizer, Splitter
from seer_core.scheduling.defaults import WholeRequests
from seer_core.scheduling.scheduler import Policies
from seer_testing.harness import DeterminismHarness, guarded
from seer_testing.queue_harness import QueueHarness
from seer_testing.rollouts import PIECE, FixedSplitter, outlast_arrivals, quiet, roll_out_at_random
from seer_testing.scenarios import (
    every_event,
    one_completion,
    placement_scenario,
    rollout_of,
    slot,
)
from seer_testing.support import expect_contract, run_within

__all__ = ["ObserverContract", "PlacerContract", "PrioritizerContract", "SplitterContract"]

EXAMPLES = 25
"""Random stories per test."""


def _requests_held() -> int:
    """Return how many requests there are in this process; they have no room for weak references."""
    gc.collect()
    return sum(issubclass(type(each), Request) for each in gc.get_objects())


class SplitterContract:
    """Tests of a ``Splitter``; ``make`` returns a new one."""

    def make(self) -> Splitter:
        """Return a new splitter."""
        raise NotImplementedError("define make(), which returns a new splitter")

    def test_it_is_a_splitter(self) -> None:
        """It has the methods of the Protocol."""
        expect_contract(self.make(), Splitter)

    @quiet(EXAMPLES)
    @given(limit=st.integers(1, 5000), prompt=st.integers(1, 5000), data=st.data())
    def test_a_chunk_has_a_token_at_least_and_no_more_than_are_left(
        self, limit: int, prompt: int, data: st.DataObject
    ) -> None:
        """Wherever a request stands, its next chunk is an int, or numpy's, in 1 .. ``remaining_tokens``."""
        group = GroupContext("g", 0, 2, prompt, limit, left=2)
        for index in range(2):
            generated = data.draw(st.integers(0, limit - 1))
            request = Request(group, index, generated_tokens=generated)
            tokens = self.make().split(request)
            kind = type(tokens)
            whole = kind is not bool and hasattr(kind, "__index__")
            assert whole, f"answered {tokens!r}, a {kind.__name__}, which is no int"
            assert 1 <= tokens <= limit - generated

    def test_what_it_is_given_is_not_changed(self) -> None:
        """The request belongs to the scheduler."""
        splitter = guarded("splitter", self.make())
        for request in rollout_of((2, 3)).waiting:
            splitter.split(request)

    def test_two_with_the_same_input_decide_the_same(self) -> None:
        """Without this, no trace replays."""
        answers = []
        for splitter in (self.make(), self.make()):
            answers.append([splitter.split(request) for request in rollout_of((3, 3)).waiting * 20])
        assert answers[0] == answers[1]

    def test_random_rollouts_lose_nothing(self) -> None:
        """Losses, failures and aborts included; see ``roll_out_at_random``."""

        def fill() -> Policies:
            return Policies(splitter=slot("splitter", self.make()))

        roll_out_at_random(st.just(fill), examples=EXAMPLES)


class PrioritizerContract:
    """Tests of a ``Prioritizer``; ``make`` returns a new, empty one."""

    def make(self) -> Prioritizer:
        """Return a new, empty prioritizer."""
        raise NotImplementedError("define make(), which returns a new, empty prioritizer")

    def test_it_is_a_prioritizer(self) -> None:
        """It has the methods of the Protocol."""
        expect_contract(self.make(), Prioritizer)

    def test_an_empty_queue_offers_nothing(self) -> None:
        """No request waits, so there is none to serve."""
        queue = self.make()
        assert (queue.peek(), len(queue)) == (None, 0)

    def test_every_request_is_offered_once(self) -> None:
        """Every request that is pushed comes out, in any order, and ``len`` says how many wait."""
        rollout_of((3, 1, 4), self.make()).drain()

    def test_peek_is_the_same_until_something_changes(self) -> None:
        """The scheduler peeks after each event, also when the placer has refused before."""
        rollout = rollout_of((3, 3), self.make())
        [queue] = rollout.queues
        while (request := queue.peek()) is not None:
            assert all(queue.peek() is request for _ in range(4)), "peek() changed its mind by itself"
            rollout.take(request)

    def test_a_request_that_was_not_offered_can_be_taken(self) -> None:
        """So an aborted one leaves the queue."""
        rollout = rollout_of((3, 3, 3), self.make())
        for _ in range(4):
            rollout.abort(_last_not_offered(rollout))
        rollout.drain()

    def test_a_request_may_come_back_as_often_as_it_has_chunks(self) -> None:
        """Each push is good for one service."""
        rollout = rollout_of((2, 3), self.make())
        for _ in range(4):
            while rollout.serve() is not None:
                pass
            for request in list(rollout.running):
                rollout.come_back(request, 5)
        rollout.drain()

    def test_one_served_out_of_its_turn_comes_back(self) -> None:
        """The scheduler now and then serves the request that has been overtaken longest, also in vain."""
        rollout = rollout_of((3, 3), self.make())
        for tokens in (0, 5, 0, 0, 5, 0):
            oldest = _last_not_offered(rollout)
            rollout.take(oldest)
            oldest.generated_tokens += tokens
            rollout.push(oldest)
        rollout.drain()

    def test_no_request_waits_for_ever_while_others_arrive(self) -> None:
        """Under any preference: the scheduler ensures it, as long as some request is offered."""

        def fill() -> Policies:
            return Policies(slot("splitter", FixedSplitter(PIECE)), slot("prioritizer", self.make()))

        outlast_arrivals(fill, EXAMPLES)

    def test_what_it_is_given_is_not_changed(self) -> None:
        """Requests and groups belong to the scheduler."""
        rollout_of((3, 3), self.make()).drain()

    @quiet(EXAMPLES)
    @given(data=st.data())
    def test_two_with_the_same_input_decide_the_same(self, data: st.DataObject) -> None:
        """Without this, no trace replays."""
        QueueHarness(self.make(), self.make(), max_tokens=50).play(data)

    def test_what_is_over_is_forgotten(self) -> None:
        """Sooner or later: of many groups that have come and gone, not half are still held.

        Some were aborted while they waited, and there are always some that wait.
        """
        rollout = rollout_of((4,), self.make())
        before, seen = _requests_held(), 0
        for _ in range(200):
            rollout.add(4)
            new = rollout.waiting[-4:]
            seen += len(new)
            rollout.abort(new.pop())
            for _ in new:
                offered = rollout.serve()
                assert offered is not None
                rollout.end(offered, 0)
        rollout.drain()
        del new, offered
        held = _requests_held() - before
        assert 2 * held < seen, f"holds {held} of {seen} requests that are over"

    def test_random_rollouts_lose_nothing(self) -> None:
        """Losses, failures and aborts included; see ``roll_out_at_random``."""

        def filler(splitter: Callable[[], Splitter]) -> Callable[[], Policies]:
            return lambda: Policies(
                splitter=slot("splitter", splitter()), prioritizer=slot("prioritizer", self.make())
            )

        roll_out_at_random(SPLITTERS.map(filler), examples=EXAMPLES)


class PlacerContract:
    """Tests of a ``Placer``; ``make`` returns a new one.

    Instances have 96 to 320 KV tokens and chunks at most 60, so make it for short chunks.
    """

    leaves_room: bool = True
    """Whether a busy instance gets only chunks for which it has a slot and KV; False for a placer that leaves
    it to the engine to preempt.
    """

    def make(self) -> Placer:
        """Return a new placer."""
        raise NotImplementedError("define make(), which returns a new placer")

    def test_it_is_a_placer(self) -> None:
        """It has the methods of the Protocol."""
        expect_contract(self.make(), Placer)

    def test_an_idle_fleet_takes_a_chunk(self) -> None:
        """A request that waits while nothing runs waits for ever."""
        for size in (1, 3):
            rig = self._rig()
            for number in range(size):
                rig.start(f"i{number}", 160, 16, 4)
            try:
                rig.group("g")
            except StalledError as error:
                raise AssertionError(f"placed nothing on {size} idle instances: {error}") from error

    def test_it_answers_one_of_the_instances_or_none(self) -> None:
        """The very objects it was given, however full they are."""
        placement_scenario(self._rig())

    def test_a_busy_instance_gets_no_more_than_it_has_room_for(self) -> None:
        """An engine without room preempts; with ``leaves_room = False`` that is the placer's intention."""
        rig = self._rig()

        def check() -> None:
            for instance in rig.scheduler.instances.values():
                assert instance.free_slots >= 0, (
                    f"more chunks than slots on {instance.id!r}; send none where free_slots is 0"
                )
                alone = instance.running <= 1
                assert alone or instance.free_kv_tokens >= 0, (
                    f"the chunks on {instance.id!r} need {-instance.free_kv_tokens} KV tokens more than it"
                    " has; compare footprint(request, chunk_tokens) with free_kv_tokens, or set leaves_room ="
                    " False"
                )

        placement_scenario(rig, check if self.leaves_room else lambda: None)

    def test_a_lost_instance_is_not_chosen_again(self) -> None:
        """One that comes back under its name is another."""
        rig = self._rig()
        rig.start("a", 160, 16, 4)
        rig.group("first", 3)
        rig.start("b", 160, 16, 4)
        rig.lose("a")
        rig.group("second", 3)
        rig.start("a", 160, 16, 4)
        rig.group("third", 5)
        rig.finish_all()

    def test_groups_that_are_over_are_forgotten(self) -> None:
        """Less than half of many groups that come and go are still held; ``group_over`` may drop one."""
        rig = self._rig()
        rig.start("a", 160, 16, 4)
        rig.start("b", 160, 16, 4)
        seen: list[weakref.ref[GroupContext]] = []
        for number in range(400):
            rig.group(f"g{number}", max_tokens=PIECE)
            seen += [weakref.ref(group) for group in rig.scheduler.contexts if group.seq == number]
            while len(rig.in_flight) > 2:
                rig.finish(next(iter(rig.in_flight)))
        gc.collect()
        held = sum(group() is not None for group in seen)
        assert 2 * held < len(seen), f"holds {held} of {len(seen)} groups that are over"

    def test_what_it_is_given_is_not_changed(self) -> None:
        """Requests, instances and their list belong to the scheduler."""
        placement_scenario(self._rig())

    def test_two_with_the_same_input_decide_the_same(self) -> None:
        """Without this, no trace replays."""
        placement_scenario(self._rig())

    def _rig(self) -> DeterminismHarness:
        """Return two schedulers by hand, each with a new placer; the placers have to decide alike."""
        return DeterminismHarness(
            lambda: Policies(slot("splitter", FixedSplitter(PIECE)), placer=slot("placer", self._made()))
        )

    def _made(self) -> Placer:
        placer = self.make()
        expect_contract(placer, Placer)
        return placer

    def test_random_rollouts_lose_nothing(self) -> None:
        """Losses, failures and aborts included; see ``roll_out_at_random``."""

        def filler(splitter: Callable[[], Splitter]) -> Callable[[], Policies]:
            return lambda: Policies(
                splitter=slot("splitter", splitter()), placer=slot("placer", self._made())
            )

        roll_out_at_random(SPLITTERS.map(filler), examples=EXAMPLES)


class ObserverContract:
    """Tests of an ``Observer``; ``make`` returns a new one, not yet started."""

    patience_s: float = 30.0
    """Seconds after which a wait has failed."""

    def make(self) -> Observer:
        """Return a new observer."""
        raise NotImplementedError("define make(), which returns a new observer")

    def test_it_is_an_observer(self) -> None:
        """It has the method of the Protocol."""
        expect_contract(self.make(), Observer)

    def test_it_takes_every_kind_of_event(self) -> None:
        """It raises at none; it would be left out from there on."""
        observer = self.make()
        for number, (event, commands) in enumerate(every_event()):
            observer.observe(float(number), event, commands)

    def test_it_takes_completions_pieces_and_the_pool_s_figures(self) -> None:
        """If it wants to see them; it changes no completion, which is the user's."""
        observer = self.make()
        if (completed := implemented(observer, "completed")) is not None:
            completion = one_completion()
            before = msgspec.msgpack.encode(completion, enc_hook=packed)
            completed(1.0, completion)
            after = msgspec.msgpack.encode(completion, enc_hook=packed)
            assert after == before, "completed() changed what it was shown"
        if (streamed := implemented(observer, "streamed")) is not None:
            streamed(1.0, "g/0")
        if (pool_reported := implemented(observer, "pool_reported")) is not None:
            pool_reported(1.0, PoolStats(capacity_bytes=1 << 20, used_bytes=1 << 10))

    def test_it_starts_again_after_its_stop(self) -> None:
        """If it has a life: the lab rolls out twice, and each arm of a comparison begins one."""

        async def live() -> None:
            observer = self.make()
            for _ in range(2):
                if (start := implemented(observer, "start")) is not None:
                    await start()
                observer.observe(0.0, *every_event()[0])
                if (stop := implemented(observer, "stop")) is not None:
                    await stop()

        run_within(self.patience_s, live(), "start() or stop()")

    def test_what_it_is_shown_is_not_changed(self) -> None:
        """The commands are carried out after it has seen them."""
        observer = guarded("observer", self.make())
        for number, (event, commands) in enumerate(every_event()):
            observer.observe(float(number), event, commands)


def _last_not_offered(rollout: QueueHarness) -> Request:
    offered = rollout.queues[0].peek()
    return next(request for request in reversed(rollout.waiting) if request is not offered)


SPLITTERS: st.SearchStrategy[Callable[[], Splitter]] = st.sampled_from(
    [WholeRequests, lambda: FixedSplitter(7), lambda: FixedSplitter(32)]
)
