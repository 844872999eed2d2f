"""The simulated KV pool: a request that moves brings its KV, if there is room for it, and in time."""

import asyncio
from itertools import pairwise

import pytest
from seer_host.contract_checks import flaw_of
from seer_session.runtime import Runtime
from seer_sim.pool import Settings, SimKVPool
from seer_sim.presets import PRESETS

from seer_core.errors import EngineError
from seer_core.ports.kv import KVPool
from seer_core.ports.weights import directory

NODES = """
[seer]
engine = "sim"
kv_pool = "sim_pool"
plugins = ["divided_rollout"]
[engine.sim]
instances = 4
instances_per_node = 2
[kv_pool.sim_pool]
spans_nodes = {spans_nodes}
[plugin.divided_rollout]
chunk_tokens = 128
"""
TOKEN_BYTES = round(PRESETS["cpu-tiny"].kv_bytes_per_token)
BLOCK_BYTES = 4 * TOKEN_BYTES


def pool_of(dram_blocks=1000, ssd_blocks=0, **rates):
    rates = {"bandwidth_bytes_per_s": 1e9, "ssd_bytes_per_s": 1e8, "latency_s": 0.0, **rates}
    return SimKVPool(Settings(dram_blocks * BLOCK_BYTES, ssd_blocks * BLOCK_BYTES, **rates))


@pytest.fixture
def move(simulate, chunk_job):
    """Return a function: 40 tokens on one instance and one more on another; the latter's output and time."""

    def make(pool, *, between=lambda first, second: None, home=False):
        first = simulate(kv_pool=pool)
        second = first if home else simulate(kv_pool=pool, name="sim-1", clock=first.clock)
        first.engine.submit(chunk_job("a0", request="r", prompt=4, max_tokens=40, known=99))
        tokens = list(first.run().outputs["a0"].token_ids)
        between(first, second)
        began_s = first.clock.now()
        second.engine.submit(chunk_job("a1", request="r", prompt=4, generated=tokens, max_tokens=1, known=99))
        second.run()
        return second.sink.outputs["a1"], first.clock.now() - began_s

    return make


def counts(output):
    return output.cached_tokens, output.pool_tokens, output.prefilled_tokens


def test_it_is_a_kv_pool_which_no_real_engine_can_use():
    assert flaw_of(pool_of(), KVPool) is None
    with pytest.raises(EngineError, match='kv_pool = "local"'):
        pool_of().store("vllm-0")


def test_a_request_that_moves_brings_its_full_blocks(move):
    # 44 tokens are there, 43 of them computed: ten blocks.
    output, _ = move(pool_of())
    assert counts(output) == (0, 40, 4)
    assert output.computed_tokens == 4


@pytest.fixture
def two_turns(simulate, chunk_job):
    """Return a function: a turn of 40 tokens, 8 of its answer, and one more on another instance."""

    def make(pool, between=lambda first: None):
        first = simulate(kv_pool=pool)
        second = simulate(kv_pool=pool, name="sim-1", clock=first.clock)
        job = chunk_job("a0", request="g/0", group="g", max_tokens=50, known=40, turn_start=0)
        first.engine.submit(job)
        tokens = [*first.run().outputs["a0"].token_ids, *range(8)]
        between(first)
        next_turn = chunk_job(
            "a1", request="g/0", group="g", generated=tokens, max_tokens=1, known=9, turn_start=52
        )
        began_s = first.clock.now()
        second.engine.submit(next_turn)
        second.run()
        return second, began_s

    return make


def test_the_kv_of_a_turn_stays_in_the_pool_while_its_tool_works(two_turns):
    second, began_s = two_turns(pool_of(latency_s=3.0))
    # 44 tokens are there, 43 of them computed: ten blocks.  The answer's 8 are new.
    assert counts(second.sink.outputs["a1"]) == (0, 40, 12)
    assert second.engine.turn_steps_s["g/0", 52] == pytest.approx(began_s + 3.0, abs=0.1)


def test_a_group_that_is_over_leaves_nothing_of_its_turns_in_the_pool(two_turns):
    pool = pool_of()
    second, _ = two_turns(pool, between=lambda first: first.engine.forget_group("g"))
    assert counts(second.sink.outputs["a1"]) == (0, 0, 52)
    assert pool.stats().released_blocks == 10
    second.engine.forget_group("g")
    second.engine.forget_group("another")
    assert pool.stats().used_bytes == 0


def test_without_a_pool_it_computes_them_again(move):
    output, _ = move(None)
    assert counts(output) == (0, 0, 44)


def test_one_that_stays_takes_nothing_from_the_pool(move):
    pool = pool_of()
    output, _ = move(pool, home=True)
    assert counts(output) == (40, 0, 4)
    assert pool.stats().got_bytes == 0


def test_kv_that_goes_while_its_chunk_waits_for_a_step_is_brought_as_well(simulate, chunk_job):
    sim = simulate(kv_pool=pool_of(), kv_blocks=24)
    texts = {}
    for name in "rs":
        sim.engine.submit(chunk_job(name, request=name, prompt=4, max_tokens=40, known=99))
        texts[name] = list(sim.run().outputs[name].token_ids)
    # At one moment: the newcomer takes the 4 free blocks, and 6 of the 10 that r had left here.
    sim.engine.submit(chunk_job("new", request="new", prompt=39, max_tokens=1, known=9))
    sim.engine.submit(chunk_job("r1", request="r", prompt=4, generated=texts["r"], max_tokens=1, known=99))
    assert counts(sim.run().outputs["r1"]) == (16, 24, 4)


def test_what_a_chunk_looks_for_twice_is_counted_once(move):
    def searched(pool):
        return pool.stats().asked_blocks, pool.stats().hit_blocks

    pool, empty = pool_of(), pool_of(dram_blocks=9)
    move(pool)
    move(empty)  # it looks when it is queued, and again when it is let in
    assert (searched(pool), searched(empty)) == ((10, 10), (10, 0))


def test_siblings_share_a_prompt_that_was_brought(simulate, chunk_job):
    pool = pool_of()
    first = simulate(kv_pool=pool)
    first.engine.submit(chunk_job("a0", request="a", prompt=17, max_tokens=20, known=99, group="g"))
    tokens = list(first.run().outputs["a0"].token_ids)
    second = simulate(kv_pool=pool, name="sim-1", clock=first.clock, kv_blocks=4 + 6 + 1)
    second.engine.submit(
        chunk_job("a1", request="a", prompt=17, generated=tokens, max_tokens=4, known=99, group="g")
    )
    second.clock.call_at(
        first.clock.now() + 0.1,
        lambda: second.engine.submit(chunk_job("b", request="b", prompt=17, max_tokens=3, group="g")),
    )
    outputs = second.run().outputs
    assert counts(outputs["a1"]) == (0, 36, 1)
    assert counts(outputs["b"]) == (16, 0, 1)
    free = second.engine._batch.pool
    assert free.free == free.capacity


def test_a_response_that_is_over_leaves_nothing(simulate, chunk_job):
    pool = pool_of()
    sim = simulate(kv_pool=pool)
    sim.engine.submit(chunk_job("a", request="r", max_tokens=20, known=99))
    sim.engine.submit(chunk_job("b", request="s", max_tokens=20, known=20))
    sim.run()
    assert pool.stats().used_bytes == 5 * BLOCK_BYTES  # of a, which goes on, 4 + 19 tokens are computed


@pytest.mark.parametrize(
    ("ssd_blocks", "seconds"), [(0, 10 * BLOCK_BYTES / 1e9), (100, 10 * BLOCK_BYTES / 1e8)]
)
def test_bringing_takes_as_long_as_the_tier_makes_it(move, ssd_blocks, seconds):
    dram_blocks = 1000 if not ssd_blocks else 9
    output, slow_s = move(pool_of(dram_blocks, ssd_blocks, latency_s=0.5))
    _, quick_s = move(pool_of(bandwidth_bytes_per_s=1e30))
    assert counts(output) == (0, 40, 4)
    assert slow_s - quick_s == pytest.approx(0.5 + seconds, rel=1e-6)


def test_what_finds_no_room_is_computed_again(move):
    pool = pool_of(dram_blocks=9)
    output, _ = move(pool)
    assert counts(output) == (0, 0, 44)
    assert pool.stats().evicted_blocks == 10 + 11  # after the first chunk and after the second
    assert pool.stats().disk_put_bytes == 0


def test_kv_that_a_lost_instance_computed_is_still_there(move):
    output, _ = move(pool_of(), between=lambda first, second: first.engine.kill("power cut"))
    assert counts(output) == (0, 40, 4)


def test_kv_of_other_weights_is_never_found(move):
    def update(first, second):
        asyncio.run(second.engine.update_weights(directory("elsewhere"), 1))

    output, _ = move(pool_of(), between=update)
    assert counts(output) == (0, 0, 44)


def test_a_cleared_pool_is_empty(move):
    pool = pool_of()

    def clear(first, second):
        assert pool.stats().used_bytes == 10 * BLOCK_BYTES
        asyncio.run(pool.clear())
        assert pool.stats().used_bytes == 0

    output, _ = move(pool, between=clear)
    assert counts(output) == (0, 0, 44)


def test_others_are_computed_while_kv_is_on_its_way(simulate, chunk_job):
    pool = pool_of(latency_s=5.0)
    pool.put("r", 0, 4, BLOCK_BYTES)
    sim = simulate(kv_pool=pool)
    sim.engine.submit(chunk_job("moved", request="r", generated=[7] * 20, max_tokens=1, known=99))
    sim.engine.submit(chunk_job("other"))
    sink = sim.run()
    assert [name for name, _ in sink.finished] == ["other", "moved"]
    assert dict(sink.finished)["other"] < 1.0 < 5.0 < dict(sink.finished)["moved"]


def test_transfers_of_one_instance_take_turns(simulate, chunk_job):
    pool = pool_of(latency_s=1.0)
    sim = simulate(kv_pool=pool)
    for name in "abc":
        pool.put(f"r{name}", 0, 5, BLOCK_BYTES)
        sim.engine.submit(chunk_job(name, generated=[7] * 20, max_tokens=1, known=99))
    assert [round(when_s) for _, when_s in sim.run().finished] == [1, 2, 3]


@pytest.mark.parametrize("end", ["abort", "kill", "stop"])
def test_a_chunk_whose_kv_is_on_its_way_can_be_given_up(simulate, chunk_job, end):
    pool = pool_of(latency_s=5.0)
    pool.put("r", 0, 5, BLOCK_BYTES)
    sim = simulate(kv_pool=pool)
    sim.engine.submit(chunk_job("moved", request="r", generated=[7] * 20, max_tokens=1, known=99))
    match end:
        case "abort":
            sim.engine.abort("moved")
        case "kill":
            sim.engine.kill("power cut")
        case "stop":
            asyncio.run(sim.engine.stop())
    assert not sim.run().outputs


def test_memory_goes_to_disk_and_comes_back_the_longest_unused_first():
    pool = pool_of(dram_blocks=4, ssd_blocks=4)
    for name in "abc":
        pool.put(name, 0, 2, BLOCK_BYTES)
    stats = pool.stats()
    assert (stats.used_bytes, stats.disk_used_bytes) == (4 * BLOCK_BYTES, 2 * BLOCK_BYTES)
    pool.fetch_s("a", 2 * BLOCK_BYTES)
    assert pool.stats().disk_got_bytes == 2 * BLOCK_BYTES
    pool.put("d", 0, 2, BLOCK_BYTES)
    # a is the latest used but d: b and c, older, are on disk.
    assert pool.fetch_s("a", BLOCK_BYTES) == BLOCK_BYTES / 1e9
    assert pool.fetch_s("c", BLOCK_BYTES) == BLOCK_BYTES / 1e8
    pool.put("e", 0, 4, BLOCK_BYTES)
    assert pool.stats().evicted_blocks == 4
    assert pool.find("b", 0, 2) == 0
    pool.drop("e")
    assert pool.stats().used_bytes == 0


def test_an_instance_says_what_bringing_and_computing_kv_cost(simulate):
    sim = simulate(kv_pool=pool_of(), max_batched=64)
    asyncio.run(sim.engine.stop())
    info = asyncio.run(sim.engine.start(sim.sink))
    assert info.kv_bytes_per_token == TOKEN_BYTES
    assert info.fetch_s_per_token == TOKEN_BYTES / 1e9
    assert info.prefill_s_per_token == PRESETS["cpu-tiny"].pass_s(64) / 64
    assert asyncio.run(simulate().engine.measure_steps([1], [0])).batch == (1,)


def test_a_pool_that_does_not_span_nodes_has_nothing_for_another_node():
    pool = pool_of(spans_nodes=False)
    pool.put("r", 0, 4, BLOCK_BYTES, "node-0")
    assert pool.find("r", 0, 4, "node-0") == 4
    assert pool.find("r", 0, 4, "node-1") == 0
    pool.put("r", 0, 5, BLOCK_BYTES, "node-1")
    assert pool.stats().put_bytes == 9 * BLOCK_BYTES
    assert pool.find("r", 0, 5, "node-1") == 5


@pytest.fixture
def moves(tmp_path):
    """Return a function that rolls out on four instances of two nodes; its moves, by whether a node ended."""

    def roll_out(spans_nodes):
        path = tmp_path / "nodes.toml"
        path.write_text(NODES.format(spans_nodes=str(spans_nodes).lower()))
        prompts = [{"group_id": f"p{number}", "prompt": "x" * 40, "n": 8} for number in range(24)]

        async def run():
            async with Runtime.from_config(path) as runtime:
                groups = runtime.groups([each | {"max_tokens": 4096} for each in prompts])
                result = await runtime.rollout(groups).wait()
                return result, {name: info.node for name, info in runtime.alive.items()}

        result, nodes = asyncio.run(run())
        pairs = [pair for each in result.completions for pair in pairwise(each.chunks)]
        apart = [(a, b) for a, b in pairs if nodes[a.instance] != nodes[b.instance]]
        within = [(a, b) for a, b in pairs if (a, b) not in apart and a.instance != b.instance]
        lengths = {each.request_id: len(each.token_ids) for each in result.completions}
        return within, apart, lengths

    return roll_out


def test_requests_move_less_between_nodes_where_that_costs_a_prefill(moves):
    within, apart, lengths = moves(spans_nodes=True)
    near, far, same = moves(spans_nodes=False)
    assert lengths == same
    assert len(far) < len(apart)
    assert len(near) > len(far)
    assert all(chunk.pool_tokens for _, chunk in apart + within)
    assert not any(chunk.pool_tokens for _, chunk in far)
    assert all(chunk.pool_tokens for _, chunk in near)


def turns_of(simulate, chunk_job, pool, instances):
    """Return what three turns of a trajectory cost, each on the next of so many instances."""
    first = simulate(kv_pool=pool)
    sims = [first, *(simulate(kv_pool=pool, name=f"sim-{n}", clock=first.clock) for n in range(1, instances))]
    prompt, outputs = list(range(100, 140)), []
    for number in range(3):
        sim, name = sims[number % instances], f"turn-{number}"
        sim.engine.submit(chunk_job(name, prompt=prompt, max_tokens=20, known=20, trajectory="t"))
        output = sim.run().outputs[name]
        assert output.stopped
        outputs.append(counts(output))
        prompt += [*output.token_ids, 1, 2, 3, 4]
    return sims, outputs


def test_a_turn_of_a_trajectory_finds_the_kv_of_the_turns_before_until_it_is_forgotten(simulate, chunk_job):
    pool = pool_of()
    sims, outputs = turns_of(simulate, chunk_job, pool, 2)
    assert outputs == [(0, 0, 40), (0, 56, 8), (56, 24, 8)]
    assert pool.stats().used_bytes > 0
    for sim in sims:
        sim.engine.forget_group("t")
        assert sim.engine._batch.pool.free == sim.engine._batch.pool.capacity
    assert pool.stats().used_bytes == 0


def test_a_turn_on_the_instance_of_the_turns_before_finds_their_kv_without_a_pool(simulate, chunk_job):
    _, outputs = turns_of(simulate, chunk_job, None, 1)
    assert outputs == [(0, 0, 40), (56, 0, 8), (80, 0, 8)]


def test_turns_of_a_trajectory_may_run_at_a_time(simulate, chunk_job):
    sim = simulate(kv_pool=pool_of())
    for name in "abc":
        sim.engine.submit(chunk_job(name, prompt=30, max_tokens=10, known=10, trajectory="t"))
    assert sorted(sim.run().outputs) == ["a", "b", "c"]
    assert sim.engine._batch.pool.free == sim.engine._batch.pool.capacity
