"""Chunks, engines and strategies of a runtime that fail, and requests that are aborted."""

import asyncio

import pytest
from seer_divided_rollout import Chunks

from seer_core.errors import (
    EngineError,
    PluginError,
    SeerError,
    TransitionError,
    WeightVersionError,
)
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import Policies

from .helpers import divided, outputs, play, policies, roll_out


def test_a_failed_chunk_is_tried_again(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine, max_chunk_failures=1) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            engine.fail()
            engine.finish(tokens=3)
            return await under_way.wait()

    (completion,) = play(run()).completions
    assert (completion.finish_reason, completion.token_ids) == ("stop", [5, 6, 7])


def test_a_request_whose_chunks_keep_failing_ends_with_what_it_has(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine, policies=policies(splitter=Chunks(2)), max_chunk_failures=1) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            engine.finish("a/0#0@hand-0", 2, stopped=False)
            engine.fail("a/0#2@hand-0")
            engine.fail("a/0#3@hand-0")
            engine.finish("a/1#1@hand-0", 1)
            return await under_way.wait()

    first, second = play(run()).completions
    assert (first.request_id, first.finish_reason, first.token_ids) == ("a/0", "error", [5, 6])
    assert second.finish_reason == "stop"


def test_a_rollout_of_which_nothing_finished_but_in_an_error_fails_with_the_first_reason(
    by_hand, hand, some_groups
):
    engine = hand()

    async def run():
        async with by_hand(engine, max_chunk_failures=1) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            for _ in range(4):
                engine.fail()
            first, second = [await anext(under_way), await anext(under_way)]
            with pytest.raises(
                EngineError, match=r"all 2 requests ended in an error, .* 'hand-0': out of luck"
            ):
                await anext(under_way)
            assert under_way.result.completions == [first, second]
            again = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await again.wait()

    play(run())


def test_engines_are_served_between_completions_that_are_ready(by_hand, hand, some_groups):
    engine, served = hand(), []

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 4))
            for _ in range(4):
                engine.finish()
            loop = asyncio.get_running_loop()
            async for completion in under_way:
                assert len(served) == completion.index
                loop.call_soon(served.append, completion.index)

    play(run())
    assert served == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("answer", "error", "facts"),
    [
        (
            {"tokens": 5, "stopped": False},
            TransitionError,
            ["'a/0'", "5 tokens for a chunk of 4", "engine broke"],
        ),
        ({"tokens": 0, "stopped": False}, TransitionError, ["'a/0'", "without a token", "'hand-0'"]),
        ({"tokens": 2, "logprobs": 3}, TransitionError, ["'hand-0'", "2 tokens but 3 log-probs"]),
        ({"version": 7}, WeightVersionError, ["'a/0#0@hand-0'", "weight version 7", "runs on 0"]),
    ],
)
def test_an_engine_that_breaks_the_contract_ends_the_rollout(
    by_hand, hand, some_groups, answer, error, facts
):
    engine = hand()

    async def run():
        async with by_hand(engine, policies=policies(splitter=Chunks(4))) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            engine.finish(**answer)
            with pytest.raises(error) as caught:
                await under_way.wait()
            assert engine.aborted == ["a/1#1@hand-0"]
            with pytest.raises(SeerError, match=r"give the runtime fresh strategies with use\(\)"):
                runtime.rollout(some_groups(1, 1))
            await runtime.use(Strategies(Policies()))
            again = runtime.rollout(some_groups(1, 1))
            engine.finish()
            await again.wait()
            return str(caught.value)

    message = play(run())
    for fact in facts:
        assert fact in message


def test_an_answer_from_the_wrong_instance_ends_the_rollout(by_hand, hand, some_groups):
    x, y = hand("x"), hand("y")

    async def run():
        async with by_hand(x, y) as runtime:
            under_way = runtime.rollout(some_groups(1, 1))
            y.jobs = dict(x.jobs)
            y.finish()
            with pytest.raises(TransitionError, match="instance 'y' answered for request 'a/0'"):
                await under_way.wait()

    play(run())


def test_a_chunk_answered_twice_counts_once(by_hand, hand, some_groups):
    engine = hand()

    async def run():
        async with by_hand(engine) as runtime:
            under_way = runtime.rollout(some_groups(1, 2))
            jobs = dict(engine.jobs)
            engine.finish(tokens=2)
            engine.jobs = jobs
            engine.finish(tokens=3)
            engine.finish(tokens=1)
            return await under_way.wait()

    assert [each.token_ids for each in play(run()).completions] == [[5, 6], [5]]


def test_a_strategy_that_raises_in_a_decision_is_named_with_slot_and_request(simulated, some_groups):
    class Tired(Chunks):
        def split(self, request):
            if request.chunks == 2:
                raise RuntimeError("enough")
            return super().split(request)

    with pytest.raises(PluginError) as caught:
        roll_out(simulated(policies(splitter=Tired(16))), some_groups(2, 2, 600))
    for fact in ("plug-in 'mine'", "slot 'splitter'", "request 'a/", "RuntimeError: enough", "-p no:mine"):
        assert fact in str(caught.value)


def test_a_strategy_that_answers_nonsense_is_named_with_slot_and_request(simulated, some_groups):
    with pytest.raises(PluginError) as caught:
        roll_out(simulated(policies(splitter=Chunks(0))), some_groups(1, 1))
    for fact in ("plug-in 'mine', slot 'splitter' for request 'a/0'", "answered 0", "1 to 64"):
        assert fact in str(caught.value)


def test_an_aborted_request_keeps_what_it_has(by_hand, hand, some_groups):
    engine = hand(max_running=1)

    async def run():
        async with by_hand(engine, policies=policies(splitter=Chunks(4))) as runtime:
            under_way = runtime.rollout(some_groups(1, 3))
            engine.finish(tokens=4, stopped=False)
            under_way.abort_request("a/0")
            under_way.abort_request("a/2")
            under_way.abort_request("absent")
            assert engine.aborted == ["a/0#1@hand-0"]
            engine.finish("a/1#2@hand-0", 2)
            return await under_way.wait()

    result = play(run())
    assert [(each.request_id, each.finish_reason, each.token_ids) for each in result.completions] == [
        ("a/0", "aborted", [5, 6, 7, 8]),
        ("a/2", "aborted", []),
        ("a/1", "stop", [5, 6]),
    ]


def test_an_aborted_rollout_leaves_the_engines_free_for_the_next(simulated, some_groups):
    async def run():
        async with simulated(divided()) as runtime:
            under_way = runtime.rollout(some_groups(8, 4, 600))
            first = await anext(under_way)
            failed = await under_way.abort()
            whole = await runtime.rollout(some_groups(8, 4, 600)).wait()
            return first, failed, whole

    first, failed, whole = play(run())
    assert failed.completions[0] == first
    assert len(failed.completions) == len(whole.completions) == 32
    assert failed.summary.finish_reasons["aborted"] > 16
    complete = outputs(whole)
    for completion in failed.completions:
        tokens = complete[completion.request_id][0]
        assert completion.token_ids == tokens[: len(completion.token_ids)]
