"""Real engines, one plain and one that speculates and prefills in pieces, over the local pool."""

import json
import os
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs

from seer_core.errors import EngineError
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.kv import StoreSpec
from seer_core.ports.weights import directory

pytest.register_assert_rewrite(
    "backends.tests.moves_in_pools", "backends.tests.sampling_controls", "backends.tests.turns_in_pools"
)

from backends.tests.sampling_controls import expect_same_tops  # noqa: E402

pytestmark = pytest.mark.engine
pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

from backends.tests.moves_in_pools import (  # noqa: E402
    expect_blocks_in_the_pool_while_their_chunk_runs,
    moved_at_random,
)
from backends.tests.turns_in_pools import (  # noqa: E402
    expect_the_kv_of_a_trajectory_until_it_is_forgotten,
    expect_the_kv_of_a_turn_until_its_group_is_over,
    released,
)

GREEDY, PLAIN = Sampling(0.0), Sampling(1.0)
BLOCK = 32
BLOCK_BYTES = BLOCK * 4 * 2 * 2 * 32 * 4
KV_BYTES = 40 * 1024 // BLOCK * BLOCK_BYTES
TOKENS = 130
BY_TEXT = pytest.mark.parametrize("by_text", [False, True], ids=["stop token", "stop string"])


@pytest.fixture(scope="module")
def pool(make_pool):
    return make_pool(64 << 20)


@pytest.fixture(scope="module")
def pair(start, models, pool, notes):
    """Two instances of the first model that share the pool; the second waits for all that it loads."""
    spec = SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    plain = start(models[0], kv_pool=pool)
    drafting = start(models[0], spec, pool, 1, awaited_kv_bytes=0, max_batched_tokens=96)
    drafting.group = "mixed"
    return plain, drafting


@pytest.fixture
def cold(pair, pool):
    """Let both instances and the pool forget everything."""

    def cold():
        for each in pair:
            each.run(each.engine.reset_cache())
        pair[0].run(pool.clear())

    cold()
    return cold


@pytest.fixture
def answers(notes):
    """Return a function that writes down what the drafting instance drafts well."""
    return lambda expected: (notes / "answers.json").write_text(json.dumps(expected, default=list))


@pytest.mark.parametrize(
    ("sampling", "chunk_tokens"),
    [
        pytest.param(GREEDY, 40, id="greedy"),
        pytest.param(PLAIN, 7, id="short"),
        *(
            pytest.param(sampling, tokens, marks=pytest.mark.long)
            for sampling, tokens in ((GREEDY, 64), (GREEDY, 7), (PLAIN, 40), (PLAIN, 64))
        ),
    ],
)
def test_moved_at_every_chunk_equals_whole_and_computes_one_block_of_old_tokens_at_most(
    pair, cold, answers, prompts, sampling, chunk_tokens, moved
):
    expected = pair[0].whole(prompts(4), sampling, TOKENS)
    answers(expected)
    cold()
    responses, rounds = moved(pair, prompts(4), sampling, TOKENS, chunk_tokens)
    assert responses == expected
    assert len(rounds) == -(-TOKENS // chunk_tokens)
    for outputs in rounds[1:]:
        assert max(output.prefilled_tokens for output in outputs) <= BLOCK
        assert min(output.pool_tokens for output in outputs) >= BLOCK


def test_chunks_that_move_at_random_among_others_change_no_token(pair, cold, answers, prompts):
    expected = pair[0].whole(prompts(12, 150), PLAIN, TOKENS)
    answers(expected)
    cold()
    assert moved_at_random(pair, prompts(12, 150), PLAIN, TOKENS) == expected


def test_log_probs_of_prompts_are_computed_though_the_pool_has_their_kv(pair, cold, answers, prompts):
    some = prompts(4, tokens=200)
    plain, drafting = pair
    answers(plain.whole(some, PLAIN, 20))
    asking = Sampling(1.0, prompt_logprobs=2)

    def respond(instance, sampling):
        jobs = [instance.job(prompt, 20, seed, sampling) for seed, prompt in enumerate(some)]
        return instance.run(instance.chunks(jobs))

    expected = respond(plain, asking)
    for output, other in zip(respond(drafting, asking), expected, strict=True):
        assert (output.pool_tokens, output.cached_tokens, output.token_ids) == (0, 0, other.token_ids)
        found, wanted = output.prompt_logprobs, other.prompt_logprobs
        assert found.logprobs == pytest.approx(wanted.logprobs, abs=2e-5)
        expect_same_tops(found.top_logprobs, wanted.top_logprobs)
    drafting.run(drafting.engine.reset_cache())
    assert any(output.pool_tokens for output in respond(drafting, PLAIN))


def test_blocks_reach_the_pool_while_their_chunk_runs_and_the_next_chunk_finds_all(
    pair, pool, cold, answers, prompts
):
    [prompt] = prompts(1)

    def respond(tokens):
        return pair[0].whole([prompt], Sampling(1.0, ignore_eos=True), tokens)[0]

    answers([respond(60)])
    cold()
    expect_blocks_in_the_pool_while_their_chunk_runs(
        pair[::-1], pool, prompt, respond, BLOCK, 3 * BLOCK_BYTES
    )


def test_an_abort_leaves_the_pool_usable(pair, cold, answers, prompts, moved):
    a, b = pair
    expected = a.whole(prompts(3), PLAIN, 120)
    answers(expected)
    long = b.job(prompts(1)[0], 600, 0, PLAIN)
    b.engine.submit(long)
    b.run(b.until(lambda: any(report.running for report in b.reports)))
    b.engine.abort(long.id)
    assert moved(pair, prompts(3), PLAIN, 120, 50)[0] == expected


def test_what_is_aborted_while_its_kv_is_on_its_way_leaves_nothing_behind(pair, pool, cold, answers, prompts):
    a, b = pair
    going_on = Sampling(1.0, ignore_eos=True)
    some = prompts(6, 150)
    expected = a.whole(some, going_on, TOKENS)
    answers(expected)
    cold()
    first = a.run(a.chunks([a.job(prompt, 64, seed, going_on) for seed, prompt in enumerate(some)]))
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(some, first, strict=True)]
    jobs = [b.job(text, TOKENS - 64, seed, going_on) for seed, text in enumerate(texts)]
    got = pool.stats().got_bytes
    for job in jobs[:3]:
        b.engine.submit(job)
    b.engine.abort(jobs[0].id)
    b.run(b.until(lambda: pool.stats().got_bytes > got))
    b.engine.abort(jobs[1].id)
    b.engine.abort(jobs[2].id)
    b.run(b.engine.reset_cache())
    outputs = b.run(b.chunks([b.job(text, TOKENS - 64, seed, going_on) for seed, text in enumerate(texts)]))
    responses = [[*begun.token_ids, *then.token_ids] for begun, then in zip(first, outputs, strict=True)]
    assert responses == expected
    assert min(output.pool_tokens for output in outputs) >= 6 * BLOCK


def dropped(pool):
    return released(pool, "vllm-0", BLOCK_BYTES)


def test_a_response_that_is_over_is_dropped_at_once_and_its_prompt_with_its_group(pair, pool, cold, prompts):
    a, b = pair
    b.group, a.group = "nothing", "nothing"
    [prompt] = prompts(1, 70)
    text = list(prompt)
    for here, tokens, last in ((a, 64, False), (b, 64, False), (a, 20, True)):
        job = here.job(text, tokens, 5, PLAIN)
        [output] = here.run(here.chunks([structs.replace(job, prompt_tokens=len(prompt), last=last)]))
        assert not output.stopped  # this seed's response is longer
        text += output.token_ids
        full = (len(text) - 1) // BLOCK
        assert dropped(pool) == (0 if not last else full - len(prompt) // BLOCK)
    for here in pair:
        here.engine.forget_group("nothing")
        here.run(here.engine.reset_cache())
    assert dropped(pool) == full
    a.group = "group"
    b.group = "mixed"


@BY_TEXT
def test_the_kv_of_a_turn_is_in_the_pool_until_its_group_is_over(pair, pool, cold, prompts, by_text):
    [prompt] = prompts(1, 70)
    [expected] = pair[0].whole([prompt], PLAIN, 100)
    cold()
    expect_the_kv_of_a_turn_until_its_group_is_over(
        pair, prompt, expected, BLOCK, lambda: dropped(pool), by_text=by_text
    )
    pair[0].group, pair[1].group = "group", "mixed"


@BY_TEXT
def test_the_kv_of_a_trajectory_is_in_the_pool_until_it_is_forgotten(pair, pool, cold, prompts, by_text):
    [prompt] = prompts(1, 70)
    [expected] = pair[0].whole([prompt], PLAIN, 100)
    cold()
    expect_the_kv_of_a_trajectory_until_it_is_forgotten(
        pair, prompt, expected, BLOCK, lambda: dropped(pool), by_text=by_text
    )
    pair[0].group, pair[1].group = "group", "mixed"


def test_an_instance_says_what_a_token_a_step_and_a_chunk_take_and_what_a_move_costs_where_kv_is_shared(
    pair, roomy
):
    for here in (*pair, roomy):
        assert here.info.kv_bytes_per_token == BLOCK_BYTES // BLOCK
        assert here.info.prefill_s_per_token > 0
        assert here.info.step_s > 0
        assert min(here.info.chunk_s, here.info.chunk_s_per_token) >= 0
    for here in pair:
        assert here.info.fetch_s_per_token is not None
        assert 0 <= here.info.move_cost <= 1
    assert roomy.info.fetch_s_per_token is None
    assert roomy.info.move_cost == 1


def test_torn_blocks_are_computed_again(pair, pool, cold, answers, prompts):
    a, b = pair
    [expected] = a.whole(prompts(1), PLAIN, 200)
    answers([expected])
    cold()
    prompt = prompts(1)[0]
    [first] = a.run(a.chunks([a.job(prompt, 120, 0, PLAIN)]))
    saved = (len(prompt) + 119) // BLOCK
    bytes_of_all = np.frombuffer(pool._memory["vllm-0"].memory, np.uint8)
    rows = np.flatnonzero(bytes_of_all.reshape(-1, 4096).any(axis=1))
    bytes_of_all[rows[-1] * 4096 : (rows[-1] + 1) * 4096] ^= 255  # somewhere in one of the blocks
    del bytes_of_all
    torn = pool.stats().torn_blocks
    [second] = b.run(b.chunks([b.job([*prompt, *first.token_ids], 80, 0, PLAIN)]))
    assert first.token_ids + second.token_ids == expected
    assert pool.stats().torn_blocks == torn + 1
    assert second.pool_tokens < saved * BLOCK


def test_new_weights_in_mid_life_find_no_kv_of_the_old_ones(pair, pool, cold, newer, models, prompts):
    a, b = pair
    b.group = "nothing"
    firsts = a.run(a.chunks([a.job(prompt, 90, i, PLAIN) for i, prompt in enumerate(prompts(4))]))
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(4), firsts, strict=True)]
    for each in pair:
        each.weight_version += 1
        each.run(each.engine.update_weights(directory(models[1]), each.weight_version))
    jobs = [b.job(text, 60, i, PLAIN) for i, text in enumerate(texts)]
    outputs = b.run(b.chunks(jobs))  # the pool still holds the old KV: keys alone must do
    expected = newer.run(newer.chunks([newer.job(text, 60, i, PLAIN) for i, text in enumerate(texts)]))
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
    assert {output.pool_tokens + output.cached_tokens for output in outputs} == {0}
    texts = [[*text, *output.token_ids] for text, output in zip(texts, outputs, strict=True)]
    again = a.run(a.chunks([a.job(text, 10, i, PLAIN) for i, text in enumerate(texts)]))
    ended = [output.stopped for output in outputs]
    assert not all(ended)
    for over, output in zip(ended, again, strict=True):
        assert output.pool_tokens > 0 or over  # of the new version; a response that ended may be gone
    a.run(pool.clear())
    assert pool.stats().used_bytes == 0
    for each in pair:
        each.weight_version += 1
        each.run(each.engine.update_weights(directory(models[0]), each.weight_version))
    b.group = "mixed"


def test_kv_of_a_killed_instance_is_there_for_the_others_and_for_itself(pair, cold, answers, models, prompts):
    a, b = pair
    expected = a.whole(prompts(3), PLAIN, 120)
    answers(expected)
    cold()
    firsts = a.run(a.chunks([a.job(prompt, 60, i, PLAIN) for i, prompt in enumerate(prompts(3))]))
    for i, prompt in enumerate(prompts(3)):
        a.engine.submit(a.job([*prompt, *firsts[i].token_ids], 600, i, PLAIN))
    a.kill()
    a.run(a.until(lambda: bool(a.losses)))
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(3), firsts, strict=True)]
    outputs = b.run(b.chunks([b.job(text, 60, i, PLAIN) for i, text in enumerate(texts)]))
    assert [
        first.token_ids + output.token_ids for first, output in zip(firsts, outputs, strict=True)
    ] == expected
    assert max(output.prefilled_tokens for output in outputs) <= BLOCK
    a.run(a.engine.start(a))
    a.weight_version = b.weight_version
    a.run(a.engine.update_weights(directory(models[0]), a.weight_version))
    outputs = a.run(a.chunks([a.job(text, 60, i, PLAIN) for i, text in enumerate(texts)]))
    assert [
        first.token_ids + output.token_ids for first, output in zip(firsts, outputs, strict=True)
    ] == expected
    assert max(output.prefilled_tokens for output in outputs) <= BLOCK


def resident_bytes(harness):
    """Return what the system says that the instance's process holds."""
    return int(Path(f"/proc/{harness.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


def scores(harness, prompts):
    jobs = [harness.job(prompt, 60, seed, PLAIN) for seed, prompt in enumerate(prompts)]
    outputs = harness.run(harness.chunks(jobs))
    return [output.token_ids for output in outputs], [output.logprobs for output in outputs]


def test_asleep_it_holds_no_kv_memory_and_awake_it_answers_as_before(pair, cold, models, prompts):
    a, b = pair
    a.used_up = b.used_up = True  # they have other weights, of which they may share no KV
    b.group = "nothing"
    many, version, degradations = prompts(8), b.weight_version, len(b.degradations)
    before = scores(b, many)
    held = resident_bytes(b)
    freed = b.run(b.engine.sleep())
    assert 0.95 * KV_BYTES < freed < 1.2 * KV_BYTES
    assert held - resident_bytes(b) > 0.95 * KV_BYTES
    b.run(b.engine.wake())
    assert scores(b, many) == before
    b.run(b.engine.sleep())
    with pytest.raises(EngineError, match="it is asleep; wake it first"):
        b.run(b.engine.update_weights(directory(models[1]), version + 1))
    b.run(b.engine.wake())
    b.weight_version = version + 1
    b.run(b.engine.update_weights(directory(models[1]), b.weight_version))
    assert scores(b, many[:2])[0] != before[0][:2]
    assert len(b.degradations) == degradations


def test_an_instance_reports_what_its_store_complains_of_and_that_it_is_given_up(
    start, models, roomy, prompts
):
    class Pool:
        def store(self, instance_id):
            return StoreSpec("kv_stores:Failing", {})

    harness = start(models[0], kv_pool=Pool())
    expected = roomy.whole(prompts(4), PLAIN, 100)
    assert harness.divided(prompts(4), PLAIN, 100, chunk_tokens=40) == expected
    assert [(each.instance_id, each.what, each.reason) for each in harness.degradations] == [
        ("vllm-0", "kv_pool", "the pool's disk is full"),
        ("vllm-0", "kv_pool", "the KV store failed: OSError: the pool is gone"),
    ]
    harness.run(harness.engine.stop())
    log = Path(harness.degradations[0].log)
    assert log.read_text().count("OSError: the pool is gone") == 1


def test_a_pool_and_engines_too_small_for_the_load_change_no_token(
    start, make_pool, models, roomy, prompts, moved
):
    expected = roomy.whole(prompts(10), PLAIN, 110)
    small = make_pool(2 * (24 * (BLOCK_BYTES + 56) + 4 * 4096))
    tight = [
        start(models[0], None, small, index, max_model_tokens=512, kv_cache_bytes=29 * BLOCK_BYTES)
        for index in range(2)
    ]
    assert tight[0].whole(prompts(10), PLAIN, 110) == expected
    preempted = [output for output in tight[0].outputs.values() if output.preemptions]
    assert preempted
    stats = small.stats()
    assert stats.evicted_blocks > 0
    assert stats.got_bytes > 0
    assert stats.used_bytes <= stats.capacity_bytes
    responses, _ = moved(tight, prompts(10), PLAIN, 110, 40)
    assert responses == expected
    for each in tight:
        pid = each.pid
        each.run(each.engine.stop())
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
