"""Open rollouts: groups that come while others run, and the same tokens as in a batch."""

import asyncio
import importlib

import pytest
from seer_trace.records import TraceWriter, replay

from seer_core.errors import EngineError, PromptError, SeerError, WeightVersionError
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import CORE, Policies, Scheduler, Slot
from tests.support.eventually import PATIENCE_S

from .helpers import SMALL_SIM, divided, outputs, play, request_ids, turns, with_timeout


def test_groups_that_come_one_by_one_have_the_tokens_of_a_batch(simulated, some_groups):
    groups = some_groups(12, 4, 600)

    async def batch():
        async with simulated(divided(), **SMALL_SIM) as runtime:
            return await runtime.rollout(groups).wait()

    async def one_by_one():
        async with simulated(divided(), **SMALL_SIM) as runtime:
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
            return rollout.result

    assert outputs(play(one_by_one())) == outputs(play(batch()))


def test_an_open_rollout_outlasts_its_groups_until_it_is_closed(simulated, some_groups):
    async def run():
        async with simulated() as runtime:
            rollout = runtime.open(keep=False)
            reader = asyncio.create_task(request_ids(rollout))
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
            completion = await asyncio.wait_for(reader, PATIENCE_S)
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


def test_arrivals_aborts_and_deadlines_replay(simulated, some_groups, tmp_path):
    trace = TraceWriter(tmp_path / "trace.jsonl")
    groups = some_groups(24, 4, 600)

    async def run():
        kills = [{"instance": "sim-1", "at_s": 0.8, "restart_after_s": 0.3}]
        observers = [Slot("observer", CORE, trace)]
        async with simulated(divided(), observers, **SMALL_SIM, kill_at_s=kills) as runtime:
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
                rollouts.append(outputs(await rollout.wait()))
            assert runtime.groups(records, iteration=0) == before
            assert rollouts[0] == rollouts[1]
            return before[0].id, rollouts[0]

    name, found = play(run())
    assert set(found) == {f"{name}{copy}/{index}" for copy in ("", "-2", "-3") for index in range(2)}
    assert len({tuple(tokens) for tokens, *_ in found.values()}) == 6


def test_an_open_rollout_forgets_the_names_of_prompts_that_have_not_come_for_long(simulated, monkeypatch):
    monkeypatch.setattr(importlib.import_module("seer_session.rollouts"), "MOST_NAMED", 2)
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
            reader = asyncio.create_task(request_ids(rollout))
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
    from seer_core.plugins.slots import Strategies

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
        async with simulated(divided(), **SMALL_SIM) as runtime:
            rollout = runtime.rollout(some_groups(6, 4, 300))
            return await asyncio.gather(request_ids(rollout), request_ids(rollout))

    one, other = play(run())
    assert len(one) + len(other) == len({*one, *other}) == 24


def test_readers_are_served_in_the_order_of_their_calls(by_hand, hand, some_groups):
    engine = hand(max_running=32)

    async def run():
        async with by_hand(engine) as runtime:
            rollout = runtime.rollout(some_groups(1, 32))
            readers = [asyncio.ensure_future(anext(rollout)) for _ in range(32)]
            await turns()
            for job in list(engine.jobs):
                engine.finish(job)
            return [completion.index for completion in await asyncio.gather(*readers)]

    assert play(run()) == list(range(32))
