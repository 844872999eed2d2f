"""Settings, lengths, the tokenizer, and a whole rollout on simulated instances."""

import asyncio
from math import log
from pathlib import Path
from statistics import fmean, pvariance

import msgspec
import pytest
from seer_session.runtime import Runtime
from seer_sim.lengths import Lengths
from seer_sim.plugin import Settings, seer_make_engines
from seer_sim.tokens import ByteTokenizer

from seer_core.errors import ConfigError, PromptError
from seer_core.model import PromptGroup, Sampling
from seer_core.plugins.hookspecs import Startup
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.engine import EngineFleet
from seer_core.scheduling.scheduler import Policies
from tests.support.patience import PATIENCE_S


def make_fleet(**settings):
    return seer_make_engines(msgspec.convert(settings, Settings), Startup(seed=0, base_dir=Path()))


def roll_out(**settings):
    groups = [
        PromptGroup(f"g{n}", tuple(range(3, 50 + n)), n=4, max_tokens=900, seed=n, known_lengths=None)
        for n in range(8)
    ]

    async def run():
        async with Runtime(Assembly(make_fleet(**settings), Strategies(Policies()))) as runtime:
            return await runtime.rollout(groups).wait()

    return asyncio.run(run())


def tokens_of(result):
    return {completion.request_id: completion.token_ids for completion in result.completions}


def test_the_factory_returns_a_pool():
    pool = make_fleet(instances=3)
    assert isinstance(pool, EngineFleet)
    assert [engine.id for engine in pool.engines] == ["sim-0", "sim-1", "sim-2"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"cost": {"overhead": 1.0}}, "overhead_s"),
        ({"cost": {"bandwidth_efficiency": 2.0}}, "bandwidth_efficiency"),
        ({"kv_capacity_tokens": 10001}, "multiple"),
        ({"kv_capacity_tokens": 4096}, "max_model_tokens = 8192"),
        ({"max_batched_tokens": 8}, "max_running"),
        ({"kill_at_s": [{"instance": "sim-9", "at_s": 1.0}]}, "sim-0, sim-1"),
        ({"speeds": {"sim-9": 0.5}}, "speeds: no instance 'sim-9'; there are sim-0, sim-1"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, words):
    with pytest.raises(ConfigError, match=words):
        make_fleet(**settings)


@pytest.mark.parametrize("settings", [{"instances": 0}, {"presets": "x"}, {"preset": "tpu"}])
def test_settings_are_strict(settings):
    with pytest.raises(msgspec.ValidationError):
        make_fleet(**settings)


def test_a_prompt_whose_response_fits_no_instance_is_refused_before_anything_runs():
    async def run():
        async with Runtime(Assembly(make_fleet(), Strategies(Policies()))) as runtime:
            runtime.rollout([PromptGroup("long", (3,) * 100, n=1, max_tokens=8100)])

    with pytest.raises(PromptError, match=r"'long': .* exceed the model's 8192 tokens"):
        asyncio.run(run())


def test_overriding_a_cost_changes_the_time():
    slow = roll_out(cost={"overhead_s": 0.1})
    assert max(c.finished_s for c in slow.completions) > 10 * max(
        c.finished_s for c in roll_out().completions
    )


def test_a_rollout_on_simulated_instances_is_the_same_every_time():
    assert roll_out().completions == roll_out().completions


def test_instances_and_kv_change_the_time_but_no_token():
    roomy = roll_out()
    tight = roll_out(instances=1, kv_capacity_tokens=1024, max_model_tokens=1024)
    assert tokens_of(tight) == tokens_of(roomy)
    assert sum(chunk.preemptions for c in tight.completions for chunk in c.chunks) > 0


def test_a_rollout_survives_the_loss_of_an_instance_token_for_token():
    kills = [{"instance": "sim-0", "at_s": 0.3, "restart_after_s": 0.2}]
    lossy = roll_out(kill_at_s=kills)
    assert tokens_of(lossy) == tokens_of(roll_out())
    after = [c for c in lossy.completions if c.instances == ["sim-0"]]
    assert all(c.finished_s > 0.5 for c in after if c.chunks[-1].dispatched_s > 0.3)


def test_a_rollout_survives_the_loss_of_every_instance_at_once():
    kills = [{"instance": f"sim-{n}", "at_s": 0.3, "restart_after_s": 60.0} for n in range(2)]
    result = roll_out(kill_at_s=kills, start_s=5.0)
    assert tokens_of(result) == tokens_of(roll_out())
    late = roll_out(kill_at_s=[{**kill, "at_s": 5.3} for kill in kills], start_s=5.0)
    assert tokens_of(late) == tokens_of(result)
    assert max(c.finished_s for c in late.completions) > 65.0


def test_weights_can_be_updated_while_a_lost_instance_is_still_down():
    async def run():
        fleet = make_fleet(kill_at_s=[{"instance": "sim-0", "at_s": 0.05, "restart_after_s": 1.0}])
        lost, updated = fleet.engines[0], asyncio.Event()
        start = lost.start

        async def start_after_the_update(sink):
            await updated.wait()
            return await start(sink)

        async with Runtime(Assembly(fleet, Strategies(Policies()))) as runtime, asyncio.timeout(60):
            lost.start = start_after_the_update
            await runtime.rollout([PromptGroup("g", (3, 4), n=8, max_tokens=50)]).wait()
            assert set(runtime.alive) == {"sim-1"}
            version = await runtime.update_weights("new")
            updated.set()
            result = await runtime.rollout([PromptGroup("h", (3, 4), n=8, max_tokens=50)]).wait()
            return version, {c.weight_version for c in result.completions}

    assert asyncio.run(run()) == (1, {1})


def test_drawn_lengths_depend_on_the_request_alone_and_are_capped(chunk_job):
    lengths = Lengths(mean_tokens=300, sigma=1.0, cap_tokens=500)
    jobs = [chunk_job(str(n), known=None, seed=n) for n in range(200)]
    drawn = [lengths.of(job) for job in jobs]
    later = [msgspec.structs.replace(job, token_ids=[*job.token_ids, 5], max_tokens=1) for job in jobs]
    assert [lengths.of(job) for job in later] == drawn
    assert 1 <= min(drawn) < max(drawn) == 500


def test_the_mean_and_the_group_share_are_as_set(chunk_job):
    def draw(share):
        lengths = Lengths(mean_tokens=1000, sigma=0.5, group_share=share, cap_tokens=10**9)
        return [
            [lengths.of(chunk_job("j", known=None, group=f"g{g}", seed=1000 * g + i)) for i in range(10)]
            for g in range(150)
        ]

    groups = draw(0.8)
    assert fmean(length for group in groups for length in group) == pytest.approx(1000, rel=0.1)
    within = fmean(pvariance([log(length) for length in group]) for group in groups)
    # Each group's own mean takes a tenth of the variance with it.
    assert within == pytest.approx(0.9 * 0.2 * 0.5**2, rel=0.1)
    assert all(len(set(group)) == 1 for group in draw(1.0))


def test_an_instance_at_half_the_speed_takes_twice_as_long_for_the_same_tokens():
    plain, slow = roll_out(instances=1), roll_out(instances=1, speeds={"sim-0": 0.5})
    assert tokens_of(slow) == tokens_of(plain)
    assert slow.summary.total_time_s == pytest.approx(2 * plain.summary.total_time_s)
    one, other = (engine._info for engine in make_fleet(speeds={"sim-1": 0.1}).engines)
    assert other.step_s == pytest.approx(10 * one.step_s)
    assert other.prefill_s_per_token == pytest.approx(10 * one.prefill_s_per_token)


def test_a_known_length_is_not_drawn(chunk_job):
    assert Lengths(cap_tokens=5).of(chunk_job("a", known=77)) == 77


def test_a_length_is_at_least_min_tokens_and_no_end_is_there_where_ends_are_ignored(chunk_job):
    def job(known, sampling):
        return msgspec.structs.replace(chunk_job("a", known=known), sampling=sampling)

    assert Lengths().of(job(8, Sampling(min_tokens=30))) == 30
    assert Lengths().of(job(77, Sampling(min_tokens=30))) == 77
    assert Lengths(cap_tokens=5).of(job(None, Sampling(min_tokens=30))) == 30
    records = [
        {"prompt": "a", "group_id": "endless", "ignore_eos": True},
        {"prompt": "a", "group_id": "drawn", "min_p": 0.1, "presence_penalty": 1.0},
    ]

    async def run():
        async with Runtime(Assembly(make_fleet(), Strategies(Policies()))) as runtime:
            groups = runtime.groups([{**each, "n": 4, "max_tokens": 3000} for each in records], iteration=0)
            return (await runtime.rollout(groups).wait()).completions

    completions = asyncio.run(asyncio.wait_for(run(), PATIENCE_S))
    ends = {(each.group_id, each.finish_reason, len(each.token_ids)) for each in completions}
    assert {end for end in ends if end[0] == "endless"} == {("endless", "length", 3000)}
    assert "stop" in {reason for group, reason, _ in ends if group == "drawn"}


def test_text_goes_in_as_bytes_and_comes_out_as_numbers():
    tokenizer = ByteTokenizer()
    assert tokenizer.encode("hé") == [3 + byte for byte in "hé".encode()]
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == tokenizer.encode(
        "user: hi\nassistant: "
    )
    assert tokenizer.decode([17, 400, 2]) == "17 400"
