"""Open rollouts that get too much, the same twice, or nothing in time."""

import asyncio

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from seer_core.errors import OverloadError, PromptError, SeerError
from seer_core.model import PromptGroup

from .helpers import SMALL_SIM, divided, play, request_ids, turns, with_timeout


def test_more_than_it_takes_at_a_time_is_refused_and_room_can_be_awaited(simulated, some_groups):
    groups = some_groups(20, 4, 300)

    async def run():
        async with simulated(divided(), **SMALL_SIM) as runtime:
            rollout = runtime.open(most_requests=10)
            most = 0

            async def produce():
                nonlocal most
                for group in groups:
                    await rollout.room(group.n)
                    rollout.add([group])
                    most = max(most, len(rollout.unfinished))
                    assert len(rollout.unfinished) <= 10
                rollout.close()

            producer = asyncio.create_task(produce())
            ids = await request_ids(rollout)
            await producer
            return most, ids

    most, ids = play(run())
    assert most > 4
    assert len(set(ids)) == 80


@given(
    wanted=st.lists(st.tuples(st.integers(1, 4), st.booleans()), min_size=1, max_size=12),
    order=st.randoms(use_true_random=False),
)
@settings(max_examples=50, deadline=None)
def test_room_is_given_first_come_first_served(by_hand, hand, wanted, order):
    """Some stop waiting, and requests finish in any order."""
    engine = hand(max_running=64)

    async def run():
        entered = []

        async def enter(rollout, number, size):
            await rollout.room(size)
            rollout.add([PromptGroup(id=str(number), prompt_token_ids=(1,), n=size, max_tokens=4)])
            entered.append(number)

        async with by_hand(engine) as runtime:
            rollout = runtime.open(most_requests=4)
            waiting = [
                asyncio.create_task(enter(rollout, number, size)) for number, (size, _) in enumerate(wanted)
            ]
            await turns(50)
            for task, (_, leaves) in zip(waiting, wanted, strict=True):
                if leaves:
                    task.cancel()
            await turns(50)
            while engine.jobs:
                assert len(rollout.unfinished) <= 4
                engine.finish(order.choice(list(engine.jobs)))
                await turns(50)
            await asyncio.gather(*waiting, return_exceptions=True)
            await rollout.abort()
        return entered, [number for number, task in enumerate(waiting) if not task.cancelled()]

    entered, stayed = play(run())
    assert entered == stayed


def test_what_is_refused_changes_nothing(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            rollout = runtime.open(most_requests=3)
            a, b = some_groups(2, 2)
            rollout.add([a])
            with pytest.raises(OverloadError, match="2 more requests, where 2 are unfinished and 3"):
                rollout.add([b])
            with pytest.raises(OverloadError, match="4 more requests"):
                await rollout.room(4)
            with pytest.raises(PromptError, match="'a': this id is that of a group under way"):
                rollout.add([msgspec.structs.replace(a, n=1)])
            assert len(engine.jobs) == 2
            engine.finish()
            engine.finish()
            rollout.add([a])  # over, so the id may come again
            rollout.close()
            with pytest.raises(SeerError, match="this rollout is closed"):
                await rollout.room()
            assert len(engine.jobs) == 2
            engine.finish()
            engine.finish()
            return await rollout.wait()

    assert play(run()).summary.groups == 2


def test_an_aborted_group_goes_at_once_and_none_of_it_takes_another_s_place(by_hand, hand, some_groups):
    engine = hand(max_running=1)

    async def run():
        async with by_hand(engine) as runtime:
            rollout = runtime.open()
            rollout.add(some_groups(2, 3))
            rollout.abort_group("a")
            rollout.abort_group("absent")
            assert engine.aborted == ["a/0#0@hand-0"]
            assert list(engine.jobs) == ["b/0#1@hand-0"]
            result = await rollout.abort()
            assert engine.aborted == ["a/0#0@hand-0", "b/0#1@hand-0"]
            assert not engine.jobs
            return result

    assert [each.finish_reason for each in play(run()).completions] == ["aborted"] * 6


def test_a_late_answer_to_what_was_aborted_is_not_taken_for_one_to_the_same_id(by_hand, hand, some_groups):
    class Late(hand):
        def abort(self, job_id):
            self.aborted.append(job_id)  # its answer is under way already

    engine = Late()
    [group] = some_groups(1, 1)

    async def run():
        async with by_hand(engine) as runtime:
            rollout = runtime.open()
            rollout.add([group])
            rollout.abort_group("a")
            rollout.add([group])
            first, second = engine.jobs
            engine.finish(first, 3)
            assert rollout._transcripts.under_way == [("hand-0", second)]
            await rollout.abort()
            again = runtime.rollout([group])
            *_, third = engine.jobs
            engine.finish(second, 3)
            engine.finish(third, 2)
            return (await rollout.wait()).completions, (await again.wait()).completions

    aborted, [last] = play(run())
    assert [each.finish_reason for each in aborted] == ["aborted"] * 2
    assert (last.finish_reason, len(last.token_ids)) == ("stop", 2)


def test_a_group_that_is_not_over_in_its_time_is_aborted(simulated, some_groups):
    late, quick = with_timeout(some_groups(2, 4, 600), 0.5)
    quick = msgspec.structs.replace(quick, max_tokens=1, timeout_s=1e6)

    async def run():
        async with simulated(divided(), **SMALL_SIM) as runtime:
            result = await runtime.rollout([late, quick]).wait()
            assert runtime._fleet.clock.now() < 1
            await runtime.rollout(some_groups(2, 4, 600)).wait()
            assert runtime._fleet.clock.now() < 1e6
            return result.completions

    completions = play(run())
    reasons = {each.request_id: each.finish_reason for each in completions}
    assert {reasons[f"b/{index}"] for index in range(4)} == {"length"}
    cut = [each for each in completions if each.finish_reason == "aborted"]
    assert cut
    assert {each.finished_s for each in cut} == {0.5}
    assert any(each.token_ids for each in cut)


def test_a_timeout_that_is_no_time_is_refused(simulated, some_groups):
    async def run(timeout_s):
        async with simulated() as runtime:
            with pytest.raises(PromptError, match="timeout_s"):
                runtime.rollout(with_timeout(some_groups(1), timeout_s))
            with pytest.raises(PromptError, match="timeout_s"):
                runtime.groups([{"prompt_token_ids": [1], "timeout_s": timeout_s}])

    for timeout_s in (0.0, -1.0, float("inf"), float("nan")):
        play(run(timeout_s))
