"""With async scheduling, where a step is planned while the last one computes, tokens and books stay the same.

It needs vLLM's second model runner, which runs here in Triton's interpreter, and a platform that schedules so
(``planning_ahead.py``).
"""

import asyncio
from pathlib import Path

import pytest
from msgspec import structs

from seer_core.model import Sampling
from seer_core.ports.weights import directory

pytestmark = pytest.mark.engine

GREEDY, PLAIN, CUT = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
SAMPLINGS = [
    pytest.param(GREEDY, id="greedy", marks=pytest.mark.long),
    pytest.param(PLAIN, id="plain", marks=pytest.mark.long),
    pytest.param(CUT, id="top-k and top-p"),
]
"""One is enough to show that nothing is lost where work is cut; `make test-all` has all."""
BLOCK = 32


@pytest.fixture(scope="module")
def ahead(start_second, models, pool):
    """An instance that plans ahead, with a pool and KV for few, and prefills in pieces."""
    few = {"max_model_tokens": 256, "kv_cache_bytes": 1 << 20, "max_batched_tokens": 64}
    ahead = start_second(models[0], None, pool, instance="planning_ahead:Ahead", **few)
    yield ahead
    ahead.run(ahead.engine.stop())


def test_the_log_says_that_steps_are_planned_ahead(ahead, roomy):
    assert "async_scheduling=True" in Path(ahead.engine.log).read_text()
    assert "async_scheduling=False" in Path(roomy.engine.log).read_text()


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_whole_divided_and_alone_its_tokens_are_those_of_steps_planned_one_by_one(
    ahead, roomy, prompts, sampling
):
    expected = roomy.whole(prompts(4), sampling, 16)
    assert ahead.whole(prompts(4), sampling, 16) == expected
    assert ahead.divided(prompts(4), sampling, 16, chunk_tokens=6) == expected
    assert ahead.alone(prompts(1), sampling, 16) == expected[:1]


def test_controls_see_the_tokens_before(ahead, roomy, prompts, most_controlled):
    expected = roomy.whole(prompts(3), most_controlled, 30)
    assert ahead.whole(prompts(3), most_controlled, 30) == expected
    assert ahead.divided(prompts(3), most_controlled, 30, chunk_tokens=11) == expected


def test_a_chunk_of_all_its_tokens_computes_none_in_vain_and_one_that_stops_one_at_most(
    ahead, roomy, prompts
):
    endless = Sampling(1.0, ignore_eos=True)
    [[*_, last], *_] = roomy.whole(prompts(3), endless, 12)
    for sampling, vain in ((endless, {0}), (structs.replace(endless, stop_token_ids=(last,)), {0, 1})):
        ahead.run(ahead.engine.reset_cache())
        jobs = [ahead.job(prompt, 24, seed, sampling) for seed, prompt in enumerate(prompts(3))]
        outputs = ahead.run(ahead.chunks(jobs))
        assert [output.token_ids for output in outputs] == roomy.whole(prompts(3), sampling, 24)
        found = {each.computed_tokens - each.prefilled_tokens - len(each.token_ids) + 1 for each in outputs}
        assert found <= vain
    assert any(output.stopped for output in outputs)


def test_preemptions_change_no_token_and_are_accounted_for(ahead, roomy, prompts):
    ahead.outputs.clear()
    endless = Sampling(1.0, ignore_eos=True)
    assert ahead.whole(prompts(8), endless, 60) == roomy.whole(prompts(8), endless, 60)
    outputs = ahead.outputs.values()
    assert any(output.preemptions for output in outputs)
    for output in outputs:  # what was preempted has its full blocks in the pool
        again = output.computed_tokens - output.prefilled_tokens - len(output.token_ids) + 1
        assert 0 <= again <= output.preemptions * BLOCK


def test_chunks_end_early_where_they_may_and_go_on_the_same(ahead, roomy, prompts):
    endless = Sampling(1.0, ignore_eos=True)
    responses, ended_early = ahead.ended_early(prompts(8), endless, 40)
    assert responses == roomy.whole(prompts(8), endless, 40)
    assert ended_early > 0


def test_a_chunk_ends_on_command_with_its_next_token_and_an_aborted_one_leaves_nothing(ahead, roomy, prompts):
    endless = Sampling(1.0, ignore_eos=True)
    [expected] = roomy.whole(prompts(1), endless, 200)
    [prompt] = prompts(1)
    job = structs.replace(ahead.job(prompt, 200, 0, endless), streams=True)
    ahead.engine.submit(job)
    ahead.run(ahead.until(lambda: bool(ahead.pieces.get(job.id))))
    ahead.engine.end_chunk(job.id)
    ahead.run(ahead.until(lambda: job.id in ahead.answers))
    ended = ahead.outputs[job.id].token_ids
    assert 0 < len(ended) < 200
    assert expected[: len(ended)] == ended
    aborted = structs.replace(ahead.job(prompt, 200, 0, endless), streams=True)
    ahead.engine.submit(aborted)
    ahead.run(ahead.until(lambda: bool(ahead.pieces.get(aborted.id))))
    ahead.engine.abort(aborted.id)
    ahead.run(ahead.engine.reset_cache())
    assert ahead.whole([prompt], endless, 16) == [expected[:16]]


def test_responses_that_move_find_all_blocks_that_were_saved_while_their_chunks_ran(
    start, ahead, models, pool, roomy, prompts, moved
):
    endless = Sampling(1.0, ignore_eos=True)
    first = start(models[0], None, pool, 1, awaited_kv_bytes=0)
    expected = roomy.whole(prompts(3), endless, 150)
    for pair in ((first, ahead), (ahead, first)):
        for each in pair:
            each.run(each.engine.reset_cache())
        first.run(pool.clear())
        responses, rounds = moved(pair, prompts(3), endless, 150, chunk_tokens=50)
        assert responses == expected
        for outputs in rounds[1:]:
            assert max(output.prefilled_tokens for output in outputs) <= BLOCK
            assert min(output.pool_tokens for output in outputs) >= BLOCK
    first.run(first.engine.stop())


def test_chunks_that_come_and_go_at_every_step_change_no_token(ahead, roomy, prompts):
    """No batch has the requests of the one before it."""
    endless = Sampling(1.0, ignore_eos=True)
    some = prompts(6)
    expected = [roomy.whole([prompt], endless, 3 + number)[0] for number, prompt in enumerate(some)]

    async def respond(number):
        outputs = await ahead.chunks([ahead.job(some[number], 3 + number, 0, endless)])
        return outputs[0].token_ids

    async def respond_all():
        return await asyncio.gather(*(respond(number) for number in range(6) for _ in range(2)))

    responses = ahead.run(respond_all())
    assert responses == [response for response in expected for _ in range(2)]


def test_steps_are_measured_and_leave_nothing_behind(ahead, roomy, prompts):
    times = ahead.run(ahead.engine.measure_steps((1, 2), (0,), 16))
    assert times.batch == (1, 2)
    assert ahead.whole(prompts(2), PLAIN, 12) == roomy.whole(prompts(2), PLAIN, 12)


def test_asleep_and_under_other_weights_it_is_what_others_are(ahead, newer, roomy, models, prompts):
    before = roomy.whole(prompts(2), PLAIN, 16)
    assert ahead.run(ahead.engine.sleep()) > 0
    ahead.run(ahead.engine.wake())
    assert ahead.whole(prompts(2), PLAIN, 16) == before
    expected = newer.whole(prompts(2), PLAIN, 16)
    for model, responses in ((models[1], expected), (models[0], before)):
        ahead.weight_version += 1
        ahead.run(ahead.engine.update_weights(directory(model), ahead.weight_version))
        assert ahead.whole(prompts(2), PLAIN, 16) == responses
