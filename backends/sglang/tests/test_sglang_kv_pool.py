"""Real SGLangs, one plain and one that drafts and prefills in pieces, over a pool: KV moves, tokens stay."""

import json
import os
from pathlib import Path

import msgspec
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
kv_local = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

from backends.tests.moves_in_pools import (  # noqa: E402
    expect_blocks_in_the_pool_while_their_chunk_runs,
    moved_at_random,
)
from backends.tests.turns_in_pools import (  # noqa: E402
    expect_the_kv_of_a_trajectory_until_it_is_forgotten,
    expect_the_kv_of_a_turn_until_its_group_is_over,
    released,
)

GREEDY, PLAIN, GOING_ON = Sampling(0.0), Sampling(1.0), Sampling(1.0, ignore_eos=True)
BLOCK = 16
KV_BYTES_PER_TOKEN = 4 * 2 * 2 * 32 * 4  # layers, keys and values, heads, their size, float32
BLOCK_BYTES = BLOCK * KV_BYTES_PER_TOKEN
KV_BYTES = 40 * 1024 * KV_BYTES_PER_TOKEN
TOKENS = 120
BY_TEXT = pytest.mark.parametrize("by_text", [False, True], ids=["stop token", "stop string"])


@pytest.fixture(scope="module")
def pool(loop):
    """A pool for three instances."""
    pool = kv_local.LocalPool(96 << 20)
    loop.run_until_complete(pool.start(["sglang-0", "sglang-1", "sglang-2"]))
    yield pool
    loop.run_until_complete(pool.stop())


@pytest.fixture(scope="module")
def texts(tmp_path_factory):
    """The file from which the drafting instance drafts."""
    return tmp_path_factory.mktemp("texts") / "texts.json"


class MoodyPool:
    """The pool, with a store whose mood is in a file."""

    def __init__(self, pool, mood):
        self.pool, self.mood = pool, mood

    def store(self, instance_id):
        settings = {**self.pool.store(instance_id).settings, "mood": str(self.mood)}
        return StoreSpec("sglang_stores:Moody", settings)


@pytest.fixture(scope="module")
def mood(tmp_path_factory):
    """The file with the mood of the drafting instance's store."""
    return tmp_path_factory.mktemp("mood") / "mood"


@pytest.fixture(scope="module")
def pair(start, models, pool, texts, mood):
    """Two instances of the first model that share the pool; the second waits for all that it loads."""
    spec = SourceSpec("sglang_sources:Prepared", {"texts": str(texts)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    plain = start(models[0], kv_pool=pool)
    moody = MoodyPool(pool, mood)
    drafting = start(models[0], 1, spec, moody, awaited_kv_bytes=0, max_batched_tokens=96)
    yield plain, drafting
    for each in (plain, drafting):
        each.run(each.engine.stop())


@pytest.fixture
def cold(pair, pool):
    """Let both instances and the pool forget everything."""
    for each in pair:
        each.run(each.engine.reset_cache())
    pair[0].run(pool.clear())


@pytest.fixture
def whole(roomy, texts, cold):
    """Return a function: responses of an instance without a pool, which are drafted from then on."""

    def whole(prompts, sampling, tokens):
        responses = roomy.whole(prompts, sampling, tokens)
        known = {seed: [*prompt, *responses[seed]] for seed, prompt in enumerate(prompts)}
        texts.write_text(json.dumps(known))
        return responses

    return whole


@pytest.mark.parametrize(
    ("sampling", "chunk_tokens"),
    [
        pytest.param(GREEDY, 40, id="greedy"),
        pytest.param(PLAIN, 64, id="plain", marks=pytest.mark.long),
        pytest.param(PLAIN, 17, id="short"),
    ],
)
def test_moved_at_every_chunk_equals_whole_and_computes_one_block_of_old_tokens_at_most(
    pair, whole, prompts, sampling, chunk_tokens, moved
):
    expected = whole(prompts(4), sampling, TOKENS)
    responses, rounds = moved(pair, prompts(4), sampling, TOKENS, chunk_tokens)
    assert responses == expected
    assert len(rounds) == -(-TOKENS // chunk_tokens)
    for outputs in rounds[1:]:
        assert max(output.prefilled_tokens for output in outputs) <= BLOCK
        assert min(output.pool_tokens for output in outputs) >= BLOCK


def test_chunks_that_move_at_random_among_others_change_no_token(pair, whole, prompts):
    some = prompts(12, 150)
    expected = whole(some, PLAIN, TOKENS)
    assert moved_at_random(pair, some, PLAIN, TOKENS) == expected


def begin_here(here, texts, tokens):
    """Write the first tokens of responses to these prompts; return the texts with them."""
    jobs = [here.job(text, tokens, seed, GOING_ON) for seed, text in enumerate(texts)]
    outputs = here.run(here.chunks(jobs))
    return [[*text, *output.token_ids] for text, output in zip(texts, outputs, strict=True)]


def found_of(output):
    """Return of how many tokens the KV was found; all prompts begin with the same token."""
    assert output.cached_tokens <= 1
    return output.cached_tokens + output.pool_tokens


def test_steps_of_others_go_on_while_a_chunk_waits_for_its_kv(pair, roomy, whole, prompts, mood):
    a, b = pair
    first, second = prompts(2, 150)
    [expected, _] = whole([first, second], GOING_ON, 84)
    [text] = begin_here(a, [first], 64)
    busy = structs.replace(b.job(second, 800, 1, GOING_ON), last=True, streams=True)
    b.engine.submit(busy)
    b.run(b.until(lambda: busy.id in b.pieces))
    waiting = b.job(text, 20, 0, GOING_ON)
    mood.write_text("is slow")
    try:
        b.reports.clear()
        b.engine.submit(waiting)
        b.run(b.until(lambda: any(report.waiting for report in b.reports)))
        pieces = len(b.pieces[busy.id])
        b.run(b.until(lambda: len(b.pieces[busy.id]) > pieces + 1))
        assert (b.reports[-1].running, b.reports[-1].waiting) == (1, 1)
        assert busy.id not in b.answers
        b.engine.end_chunk(busy.id)
    finally:
        mood.write_text("")
    b.run(b.until(lambda: {busy.id, waiting.id} <= b.outputs.keys()))
    written = b.outputs[busy.id].token_ids
    assert roomy.whole([first, second], GOING_ON, len(written))[1] == written
    assert b.outputs[waiting.id].token_ids == expected[64:84]
    assert found_of(b.outputs[waiting.id]) == (len(text) - 1) // BLOCK * BLOCK


def test_blocks_reach_the_pool_while_their_chunk_runs_and_the_next_chunk_finds_all(
    pair, pool, roomy, whole, prompts
):
    [prompt] = prompts(1)
    whole([prompt], GOING_ON, 60)
    expect_blocks_in_the_pool_while_their_chunk_runs(
        pair[::-1],
        pool,
        prompt,
        lambda tokens: roomy.whole([prompt], GOING_ON, tokens)[0],
        BLOCK,
        5 * BLOCK_BYTES,
    )


def test_blocks_reach_the_pool_while_a_chunk_with_drafts_runs(pair, pool, roomy, whole, prompts):
    a, b = pair
    [prompt] = prompts(1)
    [expected] = whole([prompt], GOING_ON, 5 * BLOCK + 41)
    job = structs.replace(b.job(prompt, 900, 0, GOING_ON), last=False, streams=True)
    b.engine.submit(job)
    b.run(b.until(lambda: pool.stats().used_bytes >= 5 * BLOCK_BYTES))
    assert job.id not in b.answers
    text = [*prompt, *expected[: 5 * BLOCK + 1]]
    [begun] = a.run(a.chunks([a.job(text, 40, 0, GOING_ON)]))
    assert begun.token_ids == expected[5 * BLOCK + 1 :][:40]
    assert begun.pool_tokens >= 5 * BLOCK
    b.engine.end_chunk(job.id)
    b.run(b.until(lambda: job.id in b.answers))
    written = b.outputs[job.id].token_ids
    assert roomy.whole([prompt], GOING_ON, len(written)) == [written]


def test_log_probs_of_prompts_are_computed_in_pieces_though_the_pool_has_their_kv(pair, whole, prompts):
    some = prompts(4, tokens=200)
    plain, drafting = pair
    whole(some, PLAIN, 20)
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


def test_torn_blocks_are_computed_again(pair, pool, whole, prompts):
    a, b = pair
    [expected] = whole(prompts(1), PLAIN, TOKENS)
    prompt = prompts(1)[0]
    [first] = a.run(a.chunks([a.job(prompt, 100, 0, PLAIN)]))
    saved = (len(prompt) + 99) // BLOCK
    bytes_of_all = np.frombuffer(pool._memory["sglang-0"].memory, np.uint8)
    rows = np.flatnonzero(bytes_of_all.reshape(-1, 4096).any(axis=1))
    bytes_of_all[rows[-1] * 4096 : (rows[-1] + 1) * 4096] ^= 255  # somewhere in one of the blocks
    del bytes_of_all
    torn = pool.stats().torn_blocks
    [second] = b.run(b.chunks([b.job([*prompt, *first.token_ids], TOKENS - 100, 0, PLAIN)]))
    assert first.token_ids + second.token_ids == expected
    assert pool.stats().torn_blocks == torn + 1
    assert second.pool_tokens < saved * BLOCK


def test_a_response_that_is_over_is_dropped_at_once_and_its_prompt_with_its_group(pair, pool, cold, prompts):
    a, b = pair
    [prompt] = prompts(1, 70)
    text, saved = list(prompt), 0
    for here, tokens, last in ((a, 64, False), (b, 64, False), (a, 20, True)):
        here.group = "nothing"
        job = here.job(text, tokens, 5, PLAIN)
        [output] = here.run(here.chunks([structs.replace(job, prompt_tokens=len(prompt), last=last)]))
        assert not output.stopped  # this seed's response is longer
        assert dropped(pool) == (saved - len(prompt) // BLOCK if last else 0)
        text += output.token_ids
        saved = saved if last else (len(text) - 1) // BLOCK
    for here in pair:
        here.engine.forget_group("nothing")
        here.run(here.engine.reset_cache())
        here.group = "group"
    assert dropped(pool) == saved


def test_what_was_saved_of_a_running_chunk_is_dropped_if_it_ends_its_response(
    pair, pool, roomy, texts, cold, prompts
):
    _, a = pair
    [prompt] = prompts(1)
    [expected] = roomy.whole([prompt], PLAIN, 120)
    texts.write_text("{}")  # so nothing is drafted
    index = next(
        at
        for at, token in enumerate(expected)
        if at >= 30 and expected.index(token) == at and (len(prompt) + at) % BLOCK > 2
    )
    a.group = "nothing"
    stops = Sampling(1.0, stop_token_ids=(expected[index],))
    [output] = a.run(a.chunks([a.job(prompt, 120, 0, stops)]))
    assert output.stopped
    assert output.token_ids == expected[: index + 1]
    full = (len(prompt) + index) // BLOCK
    assert pool.stats().used_bytes == full * BLOCK_BYTES
    assert dropped(pool) == full - len(prompt) // BLOCK
    a.engine.forget_group("nothing")
    a.run(a.engine.reset_cache())
    assert dropped(pool) == full
    a.group = "group"


@BY_TEXT
def test_the_kv_of_a_turn_is_in_the_pool_until_its_group_is_over(pair, pool, whole, prompts, by_text):
    [prompt] = prompts(1, 70)
    [expected] = whole([prompt], PLAIN, 100)
    expect_the_kv_of_a_turn_until_its_group_is_over(
        pair, prompt, expected, BLOCK, lambda: dropped(pool), by_text=by_text
    )
    for here in pair:
        here.group = "group"


@BY_TEXT
def test_the_kv_of_a_trajectory_is_in_the_pool_until_it_is_forgotten(pair, pool, whole, prompts, by_text):
    [prompt] = prompts(1, 70)
    [expected] = whole([prompt], PLAIN, 100)
    expect_the_kv_of_a_trajectory_until_it_is_forgotten(
        pair, prompt, expected, BLOCK, lambda: dropped(pool), by_text=by_text
    )
    for here in pair:
        here.group = "group"


def dropped(pool):
    return released(pool, "sglang-0", BLOCK_BYTES)


def test_an_instance_says_what_a_move_costs_where_kv_is_shared(pair, roomy):
    for here in pair:
        assert here.info.kv_bytes_per_token == BLOCK_BYTES // BLOCK
        assert here.info.fetch_s_per_token is not None
        assert 0 <= here.info.move_cost <= 1
    assert roomy.info.fetch_s_per_token is None
    assert roomy.info.move_cost == 1


def test_asleep_it_holds_no_kv_memory_and_awake_it_answers_as_before(pair, whole, models, prompts, moved):
    a, b = pair
    expected = whole(prompts(8), PLAIN, TOKENS)
    assert b.whole(prompts(8), PLAIN, TOKENS) == expected
    held = resident_bytes(b)
    freed = b.run(b.engine.sleep())
    assert 0.95 * KV_BYTES < freed < 1.2 * KV_BYTES
    assert held - resident_bytes(b) > 0.95 * KV_BYTES
    b.run(b.engine.wake())
    assert b.whole(prompts(8), PLAIN, TOKENS) == expected
    b.run(b.engine.sleep())
    with pytest.raises(EngineError, match="it is asleep; wake it first"):
        b.run(b.engine.update_weights(directory(models[1]), 1))
    b.run(b.engine.wake())
    assert moved((a, b), prompts(8), PLAIN, TOKENS, 60)[0] == expected


def resident_bytes(harness):
    """Return what the system says that the instance's process holds."""
    return int(Path(f"/proc/{harness.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.mark.parametrize("then", ["reset", "sleep"])
def test_what_is_aborted_or_ended_while_it_waits_leaves_nothing_behind(pair, whole, prompts, mood, then):
    a, b = pair
    a.used_up = b.used_up = then == "sleep"  # the KV memory of one that has slept comes back page by page
    some = prompts(6, 150)
    expected = whole(some, GOING_ON, TOKENS)
    texts = begin_here(a, some, 64)
    b.reports.clear()
    mood.write_text("is slow")
    try:
        jobs = [b.job(text, TOKENS - 64, seed, GOING_ON) for seed, text in enumerate(texts)]
        for job in jobs[:4]:
            b.engine.submit(job)
        b.run(b.until(lambda: any(report.waiting == 4 for report in b.reports)))
        b.engine.end_chunk(jobs[3].id)
        for job in jobs[:3]:
            b.engine.abort(job.id)
        b.run(b.until(lambda: b.reports[-1].waiting == 1))
    finally:
        mood.write_text("")
    b.run(b.until(lambda: jobs[3].id in b.outputs))
    assert b.outputs[jobs[3].id].token_ids == expected[3][64:65]
    b.engine.submit(jobs[4])
    b.engine.abort(jobs[4].id)
    if then == "reset":
        b.run(b.engine.reset_cache())
    else:
        b.run(b.engine.sleep())
        b.run(b.engine.wake())
    outputs = b.run(b.chunks([b.job(text, TOKENS - 64, seed, GOING_ON) for seed, text in enumerate(texts)]))
    assert [output.token_ids for output in outputs] == [response[64:] for response in expected]
    found = [(len(text) - 1) // BLOCK * BLOCK for text in texts]
    assert [found_of(output) for output in outputs] == found


def test_new_weights_in_mid_life_find_no_kv_of_the_old_ones(pair, pool, cold, roomy, models, prompts):
    every = (*pair, roomy)
    a, b = pair
    firsts = a.run(a.chunks([a.job(prompt, 90, i, PLAIN) for i, prompt in enumerate(prompts(4))]))
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(4), firsts, strict=True)]
    try:
        assert len(update(every, models[1])) == 1
        jobs = [b.job(text, 60, i, PLAIN) for i, text in enumerate(texts)]
        outputs = b.run(b.chunks(jobs))  # the pool still holds the old KV: keys alone must do
        expected = roomy.run(roomy.chunks([roomy.job(text, 60, i, PLAIN) for i, text in enumerate(texts)]))
        assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]
        assert {output.pool_tokens for output in outputs} == {0}
        assert max(output.cached_tokens for output in outputs) <= 1  # all begin with the same token
        texts = [[*text, *output.token_ids] for text, output in zip(texts, outputs, strict=True)]
        again = a.run(a.chunks([a.job(text, 10, i, PLAIN) for i, text in enumerate(texts)]))
        assert not all(first.stopped for first in outputs)
        for text, first, output in zip(texts, outputs, again, strict=True):
            # A response that ended is dropped, and may be there until its room is needed.
            assert first.stopped or found_of(output) == (len(text) - 1) // BLOCK * BLOCK
        a.run(pool.clear())
        assert pool.stats().used_bytes == 0
    finally:
        update(every, models[0])


def update(instances, model):
    """Load weights as the next version of all; return their fingerprints, which depend on the version too."""
    version = max(each.weight_version for each in instances) + 1
    found = set()
    for each in instances:
        found.add(each.run(each.engine.update_weights(directory(model), version)))
        each.weight_version = version
    return found


def test_kv_of_a_killed_instance_is_there_for_the_others_and_for_itself(pair, whole, models, prompts):
    a, b = pair
    expected = whole(prompts(3), PLAIN, TOKENS)
    firsts = a.run(a.chunks([a.job(prompt, 100, i, PLAIN) for i, prompt in enumerate(prompts(3))]))
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(3), firsts, strict=True)]
    for i, text in enumerate(texts):
        a.engine.submit(a.job(text, 600, i, PLAIN))
    a.kill()
    a.run(a.until(lambda: bool(a.losses)))

    def rest(here):
        jobs = [here.job(text, TOKENS - 100, i, PLAIN) for i, text in enumerate(texts)]
        outputs = here.run(here.chunks(jobs))
        assert [
            first.token_ids + output.token_ids for first, output in zip(firsts, outputs, strict=True)
        ] == expected
        assert max(output.prefilled_tokens for output in outputs) <= BLOCK

    rest(b)
    a.run(a.engine.start(a))
    a.run(a.engine.update_weights(directory(models[0]), a.weight_version))
    rest(a)


def test_blocks_that_are_lost_short_or_foreign_are_misses_and_a_store_that_fails_is_given_up(
    start, pair, pool, whole, models, prompts, tmp_path, moved
):
    """Its pages are of 32 tokens, and so are its blocks; it waits for them."""
    mood = tmp_path / "mood"
    moody = start(
        models[0], 2, kv_pool=MoodyPool(pool, mood), awaited_kv_bytes=0, block_size=32, max_running=8
    )
    a, _ = pair
    try:
        moody.run(moody.engine.update_weights(directory(models[0]), a.weight_version))
        moody.weight_version = a.weight_version
        expected = whole(prompts(3), PLAIN, TOKENS)
        firsts = a.run(a.chunks([a.job(prompt, 100, i, PLAIN) for i, prompt in enumerate(prompts(3))]))
        texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(3), firsts, strict=True)]
        foreign = [moody.job(text, TOKENS - 100, i, PLAIN) for i, text in enumerate(texts)]
        outputs = moody.run(moody.chunks(foreign))
        assert [
            first.token_ids + output.token_ids for first, output in zip(firsts, outputs, strict=True)
        ] == expected
        assert {output.pool_tokens for output in outputs} == {0}
        fetched = {}
        for now in ("", "promises all", "loses the last", "loses all", "fails"):
            mood.write_text(now)
            a.run(pool.clear())
            responses, rounds = moved([moody], prompts(3), PLAIN, TOKENS, 60)
            assert responses == expected
            fetched[now] = sum(output.pool_tokens for outputs in rounds for output in outputs)
        assert fetched[""] == fetched["promises all"] > fetched["loses the last"] > fetched["loses all"] == 0
        assert [(each.what, each.reason) for each in moody.degradations] == [
            ("kv_pool", "the KV store failed: OSError: the pool is gone")
        ]
    finally:
        moody.run(moody.engine.stop())


def test_kv_memory_too_small_for_the_load_changes_no_token(start, pair, pool, whole, models, prompts, moved):
    a, b = pair
    b.run(b.engine.stop())  # two instances at a time
    b.used_up = True
    tight = start(
        models[0],
        1,
        kv_pool=pool,
        awaited_kv_bytes=0,
        max_model_tokens=512,
        kv_cache_bytes=900 * KV_BYTES_PER_TOKEN,
        engine_args={"schedule_conservativeness": 0.05},  # or it would rather let them wait
    )
    tight.weight_version = a.weight_version
    try:
        tight.run(tight.engine.update_weights(directory(models[0]), a.weight_version))
        expected = whole(prompts(10), PLAIN, 130)
        responses, rounds = moved((a, tight), prompts(10), PLAIN, 130, 65)
        assert responses == expected
        there = [output for outputs in rounds[1::2] for output in outputs]
        assert any(output.preemptions for output in there)
        assert sum(output.pool_tokens for output in there) > 0
        tight.run(tight.until(lambda: tight.reports[-1].running == 0))
        assert tight.reports[-1].kv_usage == 0  # the cached KV does not count, what no request can free does
    finally:
        tight.run(tight.engine.stop())


def test_kv_moves_through_mooncake_in_pages(start, loop, models, roomy, prompts, moved):
    mooncake = pytest.importorskip("seer_mooncake", reason="backends/mooncake is not installed")
    settings = {
        "capacity_bytes": 64 << 20,
        "buffer_bytes": 1 << 20,
        "start_timeout_s": 60.0,
        "timeout_s": 60.0,
    }
    pool = mooncake.MooncakePool(msgspec.convert(settings, mooncake.Settings))
    loop.run_until_complete(pool.start(["sglang-0", "sglang-1"]))
    instances = []
    try:
        for index in range(2):
            instances.append(start(models[0], index, kv_pool=pool, block_size=32, max_running=8))
        expected = roomy.whole(prompts(6), PLAIN, TOKENS)
        responses, rounds = moved(instances, prompts(6), PLAIN, TOKENS, 40)
        assert responses == expected
        for outputs in rounds[1:]:
            assert max(output.prefilled_tokens for output in outputs) <= 32
            assert min(output.pool_tokens for output in outputs) >= 32
        assert pool.stats().torn_blocks == 0
        assert [each.degradations for each in instances] == [[], []]
    finally:
        for each in instances:
            each.run(each.engine.stop())
        loop.run_until_complete(pool.stop())
