"""Instances of two ranks each that share KV: each rank saves and loads its part of every block."""

import asyncio
import json
import os
import signal
from pathlib import Path

import attrs
import msgspec
import numpy as np
import pytest
from msgspec import structs

from backends.tests.processes import wait_until_dead
from seer_core import SharedWeights
from seer_core.model import PromptGroup, Sampling, request_seed
from seer_core.plugins.config import load_config
from seer_core.plugins.loading import fill_slots
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory
from seer_core.runtime.runtime import Runtime
from seer_core.scheduling.scheduler import Slot

pytestmark = pytest.mark.engine
kv_local = pytest.importorskip("seer_kv_local", reason="backends/kv_local is not installed")

PLAIN = Sampling(1.0)
SAMPLINGS = {"greedy": Sampling(0.0), "plain": PLAIN}
BLOCK = 32
PART_BYTES = BLOCK * 4 * 2 * 1 * 32 * 4  # layers, keys and values, heads, their size, float32
BLOCK_BYTES = 2 * PART_BYTES
TOKENS = 200


@pytest.fixture(scope="module")
def pool(loop):
    pool = kv_local.LocalPool(64 << 20)
    loop.run_until_complete(pool.start(["vllm-0", "vllm-1"]))
    yield pool
    loop.run_until_complete(pool.stop())


@pytest.fixture(scope="module")
def pair(start, models, pool, notes):
    """Two instances of two ranks that share the pool; the second drafts, and waits for all that it loads."""
    spec = SourceSpec("draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),)))
    plain = start(models[0], kv_pool=pool, tensor_parallel=2)
    drafting = start(models[0], spec, pool, 1, awaited_kv_bytes=0, tensor_parallel=2, max_batched_tokens=96)
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


@pytest.fixture(scope="module")
def expected(roomy, prompts, notes):
    """Responses of an instance of one rank, which are also what the second instance drafts."""
    found = {name: roomy.whole(prompts(5), sampling, TOKENS) for name, sampling in SAMPLINGS.items()}
    (notes / "answers.json").write_text(json.dumps(found["plain"], default=list))
    return found


def rank_of(leader, number):
    """Return the process of a rank of the instance whose worker is ``leader``."""
    children = Path(f"/proc/{leader}/task/{leader}/children").read_text().split()
    [rank] = [pid for pid in children if f"TP{number}" in Path(f"/proc/{pid}/cmdline").read_text()]
    return int(rank)


def test_an_instance_says_what_its_kv_takes_over_all_ranks_and_in_which_layout(pair, roomy):
    for here in pair:
        assert here.info.kv_bytes_per_token == roomy.info.kv_bytes_per_token == BLOCK_BYTES // BLOCK
        assert (here.info.kv_kind, roomy.info.kv_kind) == ("vllm-tp2", "vllm")
        assert here.info.fingerprint.startswith("vllm-tp2:")
        assert here.info.fetch_s_per_token is not None
    blocks, of_one = pair[0].info.kv_capacity_tokens // BLOCK, roomy.info.kv_capacity_tokens // BLOCK
    assert blocks + 1 == 2 * (of_one + 1)  # as many bytes on each device; one block is vLLM's null block


@pytest.mark.parametrize("name", SAMPLINGS)
def test_whole_or_moved_at_every_chunk_tokens_are_those_of_one_rank_and_nothing_old_is_prefilled(
    pair, pool, cold, prompts, expected, name, moved
):
    sampling = SAMPLINGS[name]
    assert pair[0].whole(prompts(5), sampling, TOKENS) == expected[name]
    cold()
    before = pool.stats()
    responses, rounds = moved(pair, prompts(5), sampling, TOKENS, 40)
    assert responses == expected[name]
    outputs = [output for outputs in rounds[1:] for output in outputs]
    assert max(output.prefilled_tokens for output in outputs) <= BLOCK
    assert min(output.pool_tokens for output in outputs) >= BLOCK
    counted = pool.stats().since(before)
    assert counted.torn_blocks == 0
    assert counted.got_bytes == sum(output.pool_tokens for output in outputs) // BLOCK * BLOCK_BYTES
    assert counted.put_bytes % BLOCK_BYTES == 0
    assert counted.put_bytes > 0
    assert any(output.drafted_at for output in outputs)


def test_parts_reach_the_pool_while_their_chunk_runs_and_the_next_chunk_finds_all(pair, pool, cold, prompts):
    plain, drafting = pair
    going_on = Sampling(1.0, ignore_eos=True)
    [prompt] = prompts(1)
    job = structs.replace(plain.job(prompt, 400, 0, going_on), last=False)
    plain.engine.submit(job)
    plain.run(plain.until(lambda: pool.stats().used_bytes >= 3 * BLOCK_BYTES))
    assert job.id not in plain.answers
    plain.run(plain.until(lambda: job.id in plain.answers))
    text = [*prompt, *plain.outputs[job.id].token_ids]
    [then] = drafting.run(drafting.chunks([drafting.job(text, 40, 0, going_on)]))
    assert then.pool_tokens == (len(text) - 1) // BLOCK * BLOCK
    cold()
    [whole] = plain.whole([prompt], going_on, 440)
    assert [*text[len(prompt) :], *then.token_ids] == list(whole)


def test_a_damaged_part_of_one_rank_makes_the_whole_block_a_miss_and_no_token_another(
    pair, pool, cold, prompts, expected
):
    a, b = pair
    prompt = prompts(1)[0]
    [first] = a.run(a.chunks([a.job(prompt, 120, 0, PLAIN)]))
    saved = (len(prompt) + 119) // BLOCK
    rows = np.frombuffer(pool._memory["vllm-0"].memory, np.uint8).reshape(-1, 4096)
    begin = np.flatnonzero(rows.any(axis=1))[-1] * 4096  # in the last part of the last block
    rows.reshape(-1)[begin : begin + 64] ^= 255
    del rows
    before = pool.stats()
    [second] = b.run(b.chunks([b.job([*prompt, *first.token_ids], TOKENS - 120, 0, PLAIN)]))
    assert [*first.token_ids, *second.token_ids] == list(expected["plain"][0])
    assert pool.stats().since(before).torn_blocks == 1
    assert second.pool_tokens < saved * BLOCK


def test_a_rank_that_is_killed_ends_its_instance_and_the_other_goes_on_with_its_kv(
    pair, cold, prompts, expected
):
    a, b = pair
    firsts = a.run(a.chunks([a.job(prompt, 100, i, PLAIN) for i, prompt in enumerate(prompts(3))]))
    texts = [[*prompt, *output.token_ids] for prompt, output in zip(prompts(3), firsts, strict=True)]
    for i, text in enumerate(texts):
        a.engine.submit(a.job(text, 600, i, Sampling(1.0, ignore_eos=True)))
    a.run(a.until(lambda: any(report.running for report in a.reports[-1:])))
    os.kill(rank_of(a.pid, 1), signal.SIGKILL)
    a.run(a.until(lambda: bool(a.losses)))
    assert len(a.losses) == 1
    assert "rank" in a.losses[0]

    def go_on(here):
        outputs = here.run(here.chunks([here.job(text, 100, i, PLAIN) for i, text in enumerate(texts)]))
        for output, first, whole in zip(outputs, firsts, expected["plain"], strict=False):
            assert [*first.token_ids, *output.token_ids] == list(whole)
            assert output.prefilled_tokens <= BLOCK

    go_on(b)
    a.run(a.engine.start(a))
    go_on(a)


def test_ranks_asleep_and_awake_again_find_their_kv_in_the_pool(pair, pool, cold, prompts, expected):
    here, _ = pair
    prompt = prompts(1)[0]
    [first] = here.run(here.chunks([here.job(prompt, 120, 0, PLAIN)]))
    assert here.run(here.engine.sleep()) > BLOCK_BYTES
    here.run(here.engine.wake())
    text = [*prompt, *first.token_ids]
    [second] = here.run(here.chunks([here.job(text, TOKENS - 120, 0, PLAIN)]))
    assert [*first.token_ids, *second.token_ids] == list(expected["plain"][0])
    assert second.prefilled_tokens <= BLOCK


def test_a_head_that_both_ranks_have_is_stored_once(start, one_head_model, loop, prompts, moved):
    pool = kv_local.LocalPool(64 << 20)
    loop.run_until_complete(pool.start(["vllm-0"]))
    one, two = start(one_head_model), start(one_head_model, kv_pool=pool, tensor_parallel=2)
    assert one.info.kv_bytes_per_token == two.info.kv_bytes_per_token == PART_BYTES // BLOCK
    before = pool.stats()
    responses, rounds = moved([two], prompts(3), PLAIN, 120, 40)
    assert responses == one.whole(prompts(3), PLAIN, 120)
    outputs = [output for outputs in rounds[1:] for output in outputs]
    assert max(output.prefilled_tokens for output in outputs) <= BLOCK
    loaded = sum(output.pool_tokens for output in outputs) // BLOCK
    assert pool.stats().since(before).got_bytes == loaded * PART_BYTES
    for here in (one, two):
        here.run(here.engine.stop())
    loop.run_until_complete(pool.stop())


def test_a_rank_that_cannot_read_its_part_costs_the_pool_and_no_token(start, models, pool, prompts, expected):
    def break_rank(launch):
        environment = {**launch.environment, "PYTHONPATH": str(Path(__file__).parent)}
        return attrs.evolve(launch, instance="broken_rank:BrokenRank", environment=environment)

    harness = start(models[0], None, pool, 1, change=break_rank, tensor_parallel=2)
    assert harness.divided(prompts(5), PLAIN, TOKENS, chunk_tokens=40) == expected["plain"]
    assert harness.losses == []
    [degradation] = harness.degradations
    assert degradation.what == "kv_pool"
    assert "rank 1 cannot read its part of the KV: OSError: rank 1 has lost its memory" in degradation.reason
    harness.run(harness.engine.stop())


def test_ranks_of_the_second_runner_write_the_same_and_go_on_with_the_kv_of_the_first(
    start_second, models, pair, pool, cold, prompts, expected, moved
):
    second = start_second(models[0], None, pool, 1, tensor_parallel=2)
    rounds = []
    for instances in ((pair[0], second), (second, pair[0])):
        for each in instances:
            each.run(each.engine.reset_cache())
        pair[0].run(pool.clear())
        responses, found = moved(instances, prompts(2), PLAIN, 80, 40)
        assert responses == [response[:80] for response in expected["plain"][:2]]
        rounds += found[1:]
    outputs = [output for outputs in rounds for output in outputs]
    assert max(output.prefilled_tokens for output in outputs) <= BLOCK
    assert min(output.pool_tokens for output in outputs) >= BLOCK
    second.run(second.engine.stop())


@pytest.mark.long
def test_ranks_whose_steps_are_planned_ahead_write_the_same(start_second, models, prompts, expected):
    ahead = start_second(models[0], instance="planning_ahead:Ahead", tensor_parallel=2)
    assert "async_scheduling=True" in Path(ahead.engine.transport.log).read_text()
    for name, sampling in SAMPLINGS.items():
        whole = [response[:40] for response in expected[name][:2]]
        assert ahead.whole(prompts(2), sampling, 40) == whole
        assert ahead.divided(prompts(2), sampling, 40, chunk_tokens=15) == whole
    ahead.run(ahead.engine.stop())


def test_new_weights_by_memory_and_broadcast_reach_every_rank_and_find_no_kv_of_the_old_ones(
    pair, pool, cold, roomy, models, prompts
):
    from safetensors.torch import load_file
    from seer_worker.weights.broadcast import BroadcastWeights

    a, b = pair
    b.group = "nothing"
    a.whole(prompts(4), PLAIN, 100)
    tensors = load_file(models[1] / "model.safetensors")
    with (
        SharedWeights() as shared,
        BroadcastWeights(piece_bytes=1 << 16) as sender,
        shared.offer(tensors.items()) as source,
        sender.offer(source) as sent,
    ):
        for here in (a, b, roomy):
            here.weight_version += 1
            by_directory = here.run(here.engine.update_weights(directory(models[1]), here.weight_version))
            assert here.run(here.engine.update_weights(source, here.weight_version)) == by_directory
            assert here.run(here.engine.update_weights(sent, here.weight_version)) == by_directory
    expected = roomy.whole(prompts(4), PLAIN, 100)
    outputs = b.run(b.chunks([b.job(prompt, 60, i, PLAIN) for i, prompt in enumerate(prompts(4))]))
    assert {output.pool_tokens + output.cached_tokens for output in outputs} == {0}
    for i, (prompt, output) in enumerate(zip(prompts(4), outputs, strict=True)):
        response = list(output.token_ids)
        if not output.stopped:
            [rest] = a.run(a.chunks([a.job([*prompt, *response], 40, i, PLAIN)]))
            assert rest.pool_tokens > 0
            response += rest.token_ids
        assert response == list(expected[i])
    for here in (a, b, roomy):
        here.weight_version += 1
        here.run(here.engine.update_weights(directory(models[0]), here.weight_version))
    b.group = "mixed"


KILL_AT = 30
"""The chunk on whose way the kill comes."""
FREE = StepTimes((1, 64), (0, 8), ((1.0, 1.0), (1.0, 1.0)))
"""Drafts cost nothing, so as many as there are get verified; and no instance measures its steps."""


class Mover:
    """Placer that sends each chunk to another instance than the last, and calls ``act`` once, on the way."""

    def __init__(self, act):
        self.act = act
        self.placed = 0

    def instance_changed(self, instance):
        pass

    def instance_lost(self, instance):
        pass

    def place(self, request, chunk_tokens, instances):
        fits = [
            one
            for one in instances
            if (one.id != request.instance or len(instances) == 1)
            and one.free_slots > 0
            and one.footprint(request, chunk_tokens) <= one.free_kv_tokens
        ]
        found = max(fits, key=lambda one: (one.free_kv_tokens, -one.seq), default=None)
        if found is not None:
            self.placed += 1
            if self.placed == KILL_AT:
                self.act()
        return found


CONFIG = """
[seer]
engine = "vllm"
kv_pool = "local"
plugins = []
restarts = {{ attempts = 0 }}

[engine.vllm]
model = "{model}"
dtype = "float32"
instances = 2
tensor_parallel = 2
kv_cache_bytes = 33_554_432
max_model_tokens = 1024
start_timeout_s = 300.0

[plugin.divided_rollout]
chunk_tokens = 48

[plugin.grouped_spec]
profile = "{profile}"
"""


def test_ranks_agree_draft_once_and_die_with_their_instance(pair, models, prompts):
    """Comes last of those with both: the second instance drafts no more, and is killed."""
    _, b = pair
    b.group = "nothing"
    without = b.whole(prompts(3), PLAIN, 40)
    b.outputs.clear()
    b.group = "garbage"
    whole = b.whole(prompts(3), PLAIN, 40)
    assert b.divided(prompts(3), PLAIN, 40, chunk_tokens=16) == whole == without
    assert any(output.drafted_at for output in b.outputs.values())
    assert b.reports[-1].drafting["proposals"] > 0
    b.group = "raise"
    assert b.whole(prompts(3), PLAIN, 40) == without
    assert [each.reason for each in b.degradations] == ["the draft source failed: ValueError: no draft today"]
    b.group = "group"
    one, again, other = (
        b.run(b.engine.update_weights(directory(model), b.weight_version))
        for model in (models[0], models[0], models[1])
    )
    assert one == again != other
    leader = b.pid
    children = [int(pid) for pid in Path(f"/proc/{leader}/task/{leader}/children").read_text().split()]
    assert len(children) >= 2
    b.kill()
    b.run(b.until(lambda: bool(b.losses)))
    assert all(wait_until_dead(pid) for pid in children)


def test_a_divided_and_drafted_rollout_in_which_a_rank_dies_has_the_tokens_of_one_rank(
    models, roomy, prompts, tmp_path
):
    groups = [PromptGroup(f"g{i}", tuple(prompt), 3, 240, seed=i) for i, prompt in enumerate(prompts(4))]
    jobs = {
        f"{group.id}/{index}": roomy.job(
            group.prompt_token_ids, group.max_tokens, request_seed(group.seed, index), group.sampling
        )
        for group in groups
        for index in range(group.n)
    }
    whole = [list(output.token_ids) for output in roomy.run(roomy.chunks(list(jobs.values())))]
    path, profile = tmp_path / "seer.toml", tmp_path / "profile.json"
    profile.write_bytes(msgspec.json.encode(FREE))
    path.write_text(CONFIG.format(model=models[0], profile=profile))
    config = load_config(path).with_plugins(("divided_rollout", "grouped_spec"))

    async def respond():
        async with Runtime.from_config(config) as runtime:

            def kill():
                os.kill(rank_of(runtime.engines["vllm-1"].worker.pid, 1), signal.SIGKILL)

            strategies = fill_slots(config)
            policies = attrs.evolve(strategies.policies, placer=Slot("placer", "test", Mover(kill)))
            await runtime.use(attrs.evolve(strategies, policies=policies))
            return await runtime.rollout(groups).wait()

    result = asyncio.run(asyncio.wait_for(respond(), 900))
    found = {one.request_id: list(one.token_ids) for one in result.completions}
    assert found == dict(zip(jobs, whole, strict=True))
    assert result.summary.instances_lost == 1
    assert result.summary.migrations > 5
    assert result.summary.accepted_tokens > 0
    assert result.summary.pool_tokens > 0
