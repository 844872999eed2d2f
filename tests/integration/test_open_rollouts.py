"""Open rollouts: groups that come while others run, and the same tokens as in a batch."""

import asyncio
import importlib

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from seer_context_sched import ContextAware
from seer_divided_rollout import Chunks, KvAware
from seer_sim.plugin import Settings

from seer_core.errors import EngineError, OverloadError, PromptError, SeerError, WeightVersionError
from seer_core.model import PromptGroup
from seer_core.plugins.config import RestartsTable
from seer_core.scheduling.scheduler import CORE, Policies, Scheduler, Slot
from seer_core.scheduling.trace import TraceWriter, replay

SIM = {
    "instances": 2,
    "kv_capacity_tokens": 4096,
    "max_model_tokens": 2048,
    "max_running": 16,
    "lengths": {"mean_tokens": 200.0, "cap_tokens": 600},
}


def sim(**more):
    return msgspec.structs.asdict(msgspec.convert({**SIM, **more}, Settings))


def divided():
    return Policies(
        Slot("splitter", "mine", Chunks(64)),
        Slot("prioritizer", "mine", ContextAware()),
        Slot("placer", "mine", KvAware(0.25)),
    )


def play(coroutine):
    """Run a coroutine; one that waits for what never comes fails instead of hanging."""
    return asyncio.run(asyncio.wait_for(coroutine, 60))


def outputs(completions):
    return {each.request_id: (each.token_ids, each.logprobs, each.finish_reason) for each in completions}


def with_timeout(groups, timeout_s):
    return [msgspec.structs.replace(group, timeout_s=timeout_s) for group in groups]


def test_groups_that_come_one_by_one_have_the_tokens_of_a_batch(simulated, some_groups):
    groups = some_groups(12, 4, 600)

    async def batch():
        async with simulated(divided(), **sim()) as runtime:
            return (await runtime.rollout(groups).wait()).completions

    async def one_by_one():
        async with simulated(divided(), **sim()) as runtime:
            rollout, coming = runtime.open(), iter(groups)
            rollout.add([next(coming), next(coming)])
            completions = []
            async for completion in rollout:
                completions.append(completion)
                if (group := next(coming, None)) is not None:
                    rollout.add([group])
                else:
                    rollout.close()
            assert rollout.result.completions == completions
            summary = rollout.result.summary
            assert (summary.groups, summary.requests) == (12, 48)
            assert not rollout._transcripts.groups
            return completions

    assert outputs(play(one_by_one())) == outputs(play(batch()))


def test_an_open_rollout_outlasts_its_groups_until_it_is_closed(simulated, some_groups):
    async def run():
        async with simulated() as runtime:
            rollout = runtime.open(keep=False)
            reader = asyncio.create_task(_ids(rollout))
            for group in some_groups(3, 1, 20):
                rollout.add([group])
                while rollout.unfinished:
                    await asyncio.sleep(0)
                for _ in range(100):  # until the reader has nothing to wait for but more groups
                    await asyncio.sleep(0)
            assert not reader.done()
            with pytest.raises(WeightVersionError, match="close it if it is open"):
                await runtime.update_weights("step 1")
            rollout.close()
            rollout.close()
            ids = await reader
            with pytest.raises(SeerError, match="this rollout is closed"):
                rollout.add(some_groups(1))
            assert await runtime.update_weights("step 1") == 1
            return ids

    assert play(run()) == ["a/0", "b/0", "c/0"]


def test_groups_that_come_late_wake_a_reader_that_had_nothing_to_wait_for(simulated, some_groups):
    async def run():
        async with simulated() as runtime:
            rollout = runtime.open()
            reader = asyncio.create_task(anext(rollout))
            for _ in range(100):  # until nothing is due on the virtual clock
                await asyncio.sleep(0)
            rollout.add(some_groups(1, 1, 20))
            completion = await asyncio.wait_for(reader, 20)
            await rollout.abort()
            return completion.request_id

    assert play(run()) == "a/0"


def test_a_result_that_was_looked_at_early_stays_as_it_was(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            rollout = runtime.rollout(some_groups(1, 2))
            engine.finish()
            early = rollout.result
            engine.finish()
            return early, await rollout.wait()

    for result, requests in zip(play(run()), (1, 2), strict=True):
        assert len(result.completions) == result.summary.requests == requests


async def _ids(rollout):
    return [completion.request_id async for completion in rollout]


def test_arrivals_aborts_and_deadlines_replay(simulated, some_groups, tmp_path):
    trace = TraceWriter(tmp_path / "trace.jsonl")
    groups = some_groups(24, 4, 600)

    async def run():
        kills = [{"instance": "sim-1", "at_s": 0.8, "restart_after_s": 0.3}]
        observers = [Slot("observer", CORE, trace)]
        async with simulated(divided(), observers, **sim(kill_at_s=kills)) as runtime:
            rollout, clock = runtime.open(), runtime._fleet.clock
            for number, group in enumerate(groups):
                due = with_timeout([group], 0.8) if number % 3 == 0 else [group]
                clock.call_at(number * 0.1, lambda due=due: rollout.add(due))
            clock.call_at(0.65, lambda: rollout.abort_group("g"))
            clock.call_at(2.35, rollout.close)
            return await rollout.wait()

    result = play(run())
    trace.close()
    reasons = result.summary.finish_reasons
    assert result.summary.requests == 96
    assert reasons["aborted"] >= 4
    assert reasons["stop"] > 48
    events = (tmp_path / "trace.jsonl").read_text()
    assert events.count('"GroupsSubmitted"') == 24
    assert events.count('"RequestsAborted"') >= 2
    assert replay(tmp_path / "trace.jsonl", Scheduler(divided())) == len(events.splitlines())


# Too much, too late, twice.


def test_more_than_it_takes_at_a_time_is_refused_and_room_can_be_awaited(simulated, some_groups):
    groups = some_groups(20, 4, 300)

    async def run():
        async with simulated(divided(), **sim()) as runtime:
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
            ids = await _ids(rollout)
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
            await settle()
            for task, (_, leaves) in zip(waiting, wanted, strict=True):
                if leaves:
                    task.cancel()
            await settle()
            while engine.jobs:
                assert len(rollout.unfinished) <= 4
                engine.finish(order.choice(list(engine.jobs)))
                await settle()
            await asyncio.gather(*waiting, return_exceptions=True)
            await rollout.abort()
        return entered, [number for number, task in enumerate(waiting) if not task.cancelled()]

    entered, stayed = play(run())
    assert entered == stayed


async def settle():
    """Let all tasks that are ready go on."""
    for _ in range(50):
        await asyncio.sleep(0)


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
            rollout.abort_group("nobody")
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
        async with simulated(divided(), **sim()) as runtime:
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


# Its place among rollouts.


def test_prompts_of_one_open_rollout_belong_to_one_iteration(simulated):
    records = [{"prompt_token_ids": [1, 2, 3], "n": 2}]

    async def run():
        async with simulated() as runtime:
            rollout = runtime.open()
            first = runtime.groups(records)
            rollout.add(first)
            assert runtime.groups([{**records[0], "group_id": first[0].id}]) == first
            await rollout.abort()
            assert runtime.iteration == 1
            assert runtime.groups(records) != first
            runtime.open().close()
            assert runtime.iteration == 1

    play(run())


def test_equal_prompts_of_an_open_rollout_are_groups_of_their_own_and_repeat_as_a_whole(simulated):
    records = [{"prompt_token_ids": [1, 2, 3], "n": 2}]

    async def run():
        async with simulated() as runtime:
            before = runtime.groups(records)
            rollouts = []
            for _ in range(2):
                rollout = runtime.open()
                with pytest.raises(PromptError):
                    runtime.groups([*records, {}], iteration=7)
                for _ in range(3):
                    rollout.add(runtime.groups(records, iteration=7))
                rollout.close()
                rollouts.append(outputs((await rollout.wait()).completions))
            assert runtime.groups(records, iteration=0) == before
            assert rollouts[0] == rollouts[1]
            return before[0].id, rollouts[0]

    name, found = play(run())
    assert set(found) == {f"{name}{copy}/{index}" for copy in ("", "-2", "-3") for index in range(2)}
    assert len({tuple(tokens) for tokens, *_ in found.values()}) == 6


def test_an_open_rollout_forgets_the_names_of_prompts_that_have_not_come_for_long(simulated, monkeypatch):
    monkeypatch.setattr(importlib.import_module("seer_core.runtime.rollout"), "MOST_NAMED", 2)
    one, two, three = ({"prompt_token_ids": [number], "n": 1} for number in (1, 2, 3))

    async def run():
        async with simulated() as runtime:
            rollout, names = runtime.open(), []
            for record in (one, two, one, three, one, two):
                groups = runtime.groups([record])
                rollout.add(groups)
                names.append(groups[0].id)
                await anext(rollout)
            await rollout.abort()
            return names, len(rollout.named)

    (first, second, again, _, third, forgotten), remembered = play(run())
    assert (again, third, forgotten, remembered) == (f"{first}-2", f"{first}-3", second, 2)


def test_an_open_rollout_fails_with_its_last_instance_and_takes_no_more(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine, restarts=RestartsTable(attempts=0)) as runtime:
            rollout = runtime.open()
            reader = asyncio.create_task(_ids(rollout))
            await asyncio.sleep(0)
            engine.die()
            with pytest.raises(EngineError, match="no instance is left"):
                await reader
            with pytest.raises(EngineError, match="no instance is left"):
                rollout.add(some_groups(1))
            rollout.close()
            rollout.abort_group("a")

    play(run())


def test_what_failed_does_not_touch_the_rollout_after_it(by_hand, hand, some_groups):
    from seer_core.plugins.loading import Strategies

    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            failed = runtime.open()
            failed.add(some_groups(1))
            engine.finish(logprobs=3)  # too many: the engine broke the contract
            with pytest.raises(SeerError, match="log-probs"):
                await failed.wait()
            engine.jobs.clear()
            await runtime.use(Strategies(Policies()))
            rollout = runtime.open()
            rollout.add(some_groups(1))
            failed.close()
            failed.abort_group("a")
            failed.abort_request("a/0")
            assert (rollout.open, len(engine.jobs)) == (True, 2)
            await rollout.abort()

    play(run())


def test_each_of_two_readers_gets_what_the_other_does_not(simulated, some_groups):
    async def run():
        async with simulated(divided(), **sim()) as runtime:
            rollout = runtime.rollout(some_groups(6, 4, 300))
            return await asyncio.gather(_ids(rollout), _ids(rollout))

    one, other = play(run())
    assert len(one) + len(other) == len({*one, *other}) == 24
