"""Chunks that end on demand: a rollout is paused, an instance leaves or is removed."""

import asyncio

import pytest

from seer_core.model.events import InstanceLeaving, InstanceStopped, RolloutPaused, RolloutResumed
from seer_core.scheduling.scheduler import Slot
from tests.support.eventually import aeventually

from .helpers import Recorder, divided, outputs, play, turns


@pytest.fixture
def ending(hand):
    """An instance by hand that ends chunks on demand, with three tokens, unless it is ``deaf``."""

    class Ending(hand):
        deaf = False

        def end_chunk(self, job_id):
            if not self.deaf:
                asyncio.get_running_loop().call_soon(lambda: self.finish(job_id, 3, stopped=False))

    return Ending


def response(completion):
    return list(completion.token_ids)


def tokens_of(job):
    return job.token_ids[job.prompt_tokens :]


def test_a_paused_rollout_keeps_what_its_chunks_have_and_sends_none_until_it_is_resumed(
    by_hand, ending, some_groups
):
    x, recorder = ending("x"), Recorder()

    async def run():
        async with by_hand(x, observers=[Slot("observer", "test", recorder)]) as runtime:
            rollout = runtime.rollout(some_groups(1, 2))
            await rollout.pause()
            await turns()
            assert not x.jobs
            assert [rollout.written_tokens(each) for each in ("a/0", "a/1")] == [3, 3]
            rollout.resume()
            assert [tokens_of(job) for job in x.jobs.values()] == [[5, 6, 7]] * 2
            for job_id in list(x.jobs):
                x.finish(job_id, 2)
            return await rollout.wait()

    assert list(map(response, play(run()).completions)) == [[5, 6, 7, 8, 9]] * 2
    kinds = [type(event) for event in recorder.seen]
    assert kinds.index(RolloutPaused) < kinds.index(RolloutResumed)


def test_a_pause_ends_in_time_and_with_its_rollout_and_does_not_wait_for_those_that_cannot_end_a_chunk(
    by_hand, hand, ending, some_groups
):
    x, y = ending("x"), hand("y")
    x.deaf = True

    async def run():
        async with by_hand(x, y) as runtime:
            rollout = runtime.rollout(some_groups(1, 2))
            await rollout.pause(limit_s=0.01)
            assert x.jobs
            assert y.jobs
            await rollout.abort()
            await runtime.remove("x")
            rollout = runtime.rollout(some_groups(1, 1))
            assert y.jobs
            await rollout.pause(limit_s=float("inf"))
            await rollout.abort()
            await rollout.pause()  # of one that is over: nothing

    play(run())


@pytest.mark.parametrize("how", ["is drained", "is removed"])
def test_an_instance_that_leaves_takes_no_chunk_and_brings_in_what_it_has(
    by_hand, ending, hand, some_groups, how
):
    x, y, recorder = ending("x"), hand("y"), Recorder()

    async def run():
        async with by_hand(x, y, observers=[Slot("observer", "test", recorder)]) as runtime:
            rollout = runtime.rollout(some_groups(1, 2))
            await turns()
            [job] = x.jobs.values()
            if how == "is drained":
                x.sink.leaving("x", "its node is being drained")
                assert set(runtime.alive) == {"y"}
            else:
                removals = [asyncio.ensure_future(runtime.remove("x")) for _ in range(2)]
            await aeventually(lambda: job.request_id in {each.request_id for each in y.jobs.values()})
            assert sorted(map(tokens_of, y.jobs.values())) == [[], [5, 6, 7]]
            for each in list(y.jobs):
                y.finish(each, 2)
            if how == "is removed":
                assert set(runtime.alive) == {"y"}
                await asyncio.gather(*removals)
            return await rollout.wait()

    assert sorted(map(response, play(run()).completions)) == [[5, 6], [5, 6, 7, 8, 9]]
    kinds = [type(event) for event in recorder.seen]
    assert kinds.index(InstanceLeaving) < kinds.index(InstanceStopped)
    assert x.stops


def test_an_instance_that_leaves_and_does_not_answer_is_waited_for_within_a_limit(
    by_hand, ending, hand, some_groups, monkeypatch
):
    monkeypatch.setattr("seer_core.runtime.fleet.END_CHUNKS_S", 0.05)
    x, y = ending("x"), hand("y")
    x.deaf = True

    async def run():
        async with by_hand(x, y) as runtime:
            rollout = runtime.rollout(some_groups(1, 2))
            [job] = x.jobs.values()
            await runtime.remove("x")
            [moved] = [each for each in y.jobs.values() if each.request_id == job.request_id]
            assert tokens_of(moved) == []
            await rollout.abort()

    play(run())


def test_a_paused_rollout_of_simulated_engines_waits_for_its_resume(simulated, some_groups):
    async def run():
        async with simulated(divided(), instances=1) as runtime:
            rollout = runtime.rollout(some_groups(1, 2, max_tokens=400))
            await rollout.pause()
            reading = asyncio.ensure_future(anext(rollout))
            await turns(1000)
            assert not reading.done()
            rollout.resume()
            assert (await reading).request_id in ("a/0", "a/1")
            await rollout.wait()

    play(run())


def test_pauses_and_departures_change_no_token_of_simulated_engines(simulated, some_groups):
    async def run(disturb):
        async with simulated(divided(), instances=3) as runtime:
            rollout = runtime.rollout(some_groups(4, 4, max_tokens=400))
            if disturb:
                for name in ("sim-0", "sim-2"):
                    await rollout.pause()
                    written = sum(map(rollout.written_tokens, rollout.unfinished))
                    rollout.resume()
                    await runtime.remove(name)
                    assert sum(map(rollout.written_tokens, rollout.unfinished)) > written > 0
            return await rollout.wait()

    assert outputs(play(run(disturb=True))) == outputs(play(run(disturb=False)))
