"""The comparison: every arm gives the baseline's tokens, and the figures are ratios to it."""

import asyncio

import pytest
from msgspec.structs import replace
from seer_cli.compare import _cell
from seer_cli.comparison import FIGURES, ArmResult, arms_of, compare, left_out
from seer_host.config_files import load_config
from seer_session.results import tail_time_s
from seer_session.runtime import Runtime

from seer_core.errors import ConfigError

TECHNIQUES = ("divided_rollout", "context_sched")
SIM = """
[plugin.divided_rollout]
chunk_tokens = 32
[engine.sim]
kv_capacity_tokens = 1024
max_model_tokens = 512
[engine.sim.lengths]
mean_tokens = 150
"""


@pytest.fixture
def compared(write_config, some_groups):
    """Return a function that runs a comparison of ``plugins`` on the simulator."""

    def run(plugins=TECHNIQUES, more="", repeat=1, groups=None):
        config = load_config(write_config(plugins, SIM + more))

        async def main():
            async with Runtime.from_config(config.with_plugins(())) as runtime:
                return await compare(runtime, config, groups or some_groups(8, 4, 400), repeat=repeat)

        return asyncio.run(main())

    return run


def test_the_techniques_are_added_one_by_one_and_the_oracle_stands_alone(write_config):
    arms = arms_of(load_config(write_config(TECHNIQUES)))
    assert [(arm.name, arm.plugins, arm.has_lengths) for arm in arms] == [
        ("baseline", ("group_round_robin",), False),
        ("+ divided_rollout", ("divided_rollout",), False),
        ("+ context_sched", ("divided_rollout", "context_sched"), False),
        ("oracle", ("divided_rollout", "oracle_longest_first"), True),
    ]


def test_a_technique_that_is_not_enabled_and_an_empty_oracle_are_left_out(write_config):
    path = write_config(TECHNIQUES, "[compare]\noracle = []")
    arms = arms_of(load_config(path, without=["divided_rollout"]))
    assert [(arm.name, arm.plugins) for arm in arms] == [
        ("baseline", ("group_round_robin",)),
        ("+ context_sched", ("context_sched",)),
    ]


def test_a_comparison_without_techniques_is_refused(write_config):
    with pytest.raises(ConfigError, match=r"none of \[compare\].techniques is in \[seer\].plugins; add one"):
        arms_of(load_config(write_config()))


def test_a_misspelt_technique_is_not_just_left_out(write_config):
    path = write_config(TECHNIQUES, '[compare]\ntechniques = ["divided_rollout", "contxt_sched"]')
    with pytest.raises(ConfigError, match=r"\[compare\].techniques: .*did you mean 'context_sched'"):
        arms_of(load_config(path))


def test_every_arm_gives_the_same_tokens_under_pressure(compared):
    results = compared()
    assert [result.arm.name for result in results] == [
        "baseline",
        "+ divided_rollout",
        "+ context_sched",
        "oracle",
    ]
    assert all(result.tokens_equal for result in results)
    baseline, divided = results[0].summaries[0], results[1].summaries[0]
    assert baseline.preemptions > 0
    assert divided.preemptions == 0
    assert divided.chunks > 2 * baseline.chunks
    assert {result.summaries[0].tokens for result in results} == {baseline.tokens}


def test_an_arm_s_object_has_every_figure_and_its_ratio(compared):
    results = compared()
    baseline, divided = results[0].to_json(results[0]), results[1].to_json(results[0])
    assert baseline["name"] == "baseline"
    assert divided["plugins"] == ["divided_rollout"]
    assert {*FIGURES, "tokens", "tokens_equal_to_baseline"} < set(divided)
    assert divided["tokens_equal_to_baseline"] is True
    assert divided["tokens"] == baseline["tokens"]
    assert baseline["ratio_to_baseline"]["total_time_s"] == 1
    ratio = divided["total_time_s"] / baseline["total_time_s"]
    assert divided["ratio_to_baseline"]["total_time_s"] == pytest.approx(ratio)
    # The baseline migrates nothing, so there is no ratio of migrations.
    assert baseline["migrations"] == 0
    assert "migrations" not in divided["ratio_to_baseline"]


def test_repeats_give_a_median_and_a_spread(compared):
    for result in compared(repeat=3):
        document = result.to_json(result)
        assert document["repeats"] == len(result.summaries) == 3
        # The simulator repeats itself, and caches are cold each time.
        for figure in FIGURES:
            assert document["spread"][figure] == pytest.approx([document[figure]] * 2)


def test_a_loss_in_one_arm_changes_no_token(compared):
    more = "[[engine.sim.kill_at_s]]\ninstance = 'sim-0'\nat_s = 0.3\n"
    results = compared(more=more)
    assert all(result.tokens_equal for result in results)
    assert sum(result.summaries[0].instances_lost for result in results) == 1


def test_an_arm_with_other_tokens_is_reported(by_hand, hand, write_config, some_groups):
    class Careless(hand):
        """Its tokens depend on the length of the chunk that they are asked for in."""

        def submit(self, job):
            super().submit(job)
            asyncio.get_running_loop().call_soon(self.answer, job)

        def answer(self, job):
            self.finish(job.id, job.max_tokens, stopped=job.group_id == "b" and job.max_tokens < 64)

    config = load_config(write_config(TECHNIQUES, SIM + "[compare]\noracle = []"))

    async def run():
        async with by_hand(Careless()) as runtime:
            return await compare(runtime, config, some_groups(2, 2, 64), repeat=2)

    baseline, *others = asyncio.run(run())
    assert baseline.tokens_equal
    for other in others:
        assert not other.tokens_equal
        assert other.differing == ["b/0", "b/1"]
        assert other.to_json(baseline)["tokens_equal_to_baseline"] is False


def test_figures_are_medians_and_ratios_of_pairs(compared):
    baseline, other, *_ = compared(repeat=2)
    first, second = other.summaries
    assert other.stats.spread("chunks").median == (first.chunks + second.chunks) / 2
    assert other.stats.ratio("preemptions", baseline.stats) == 0
    assert ArmResult(other.arm, [first, second]).stats.ratio("migrations", baseline.stats) is None


def test_there_is_no_ratio_to_a_time_that_shows_as_nothing(compared):
    baseline, other, *_ = compared()
    for tail, ratio in ((0.0, None), (0.0007, None), (0.049, None), (0.05, 122.0)):
        base = ArmResult(baseline.arm, [replace(baseline.summaries[0], tail_time_s=tail)])
        mine = ArmResult(other.arm, [replace(other.summaries[0], tail_time_s=6.1)])
        assert mine.stats.ratio("tail_time_s", base.stats) == (
            None if ratio is None else pytest.approx(ratio)
        )
        assert ("tail_time_s" in mine.to_json(base)["ratio_to_baseline"]) == (ratio is not None)
        cell = _cell(mine, "tail_time_s", base)
        assert cell == ("6.1" if ratio is None else "6.1 (122.00x)")


def test_the_tail_is_the_time_of_the_last_tenth():
    assert tail_time_s([]) == 0
    assert tail_time_s([3.0]) == 0
    assert tail_time_s([float(time) for time in range(20, 0, -1)]) == 2
    assert tail_time_s([1.0] * 18 + [4.0, 11.0]) == 10


WATCHER = """
from seer_core.plugins.hookspecs import hookimpl

class Watcher:
    seen = []
    def __init__(self):
        self.seen.append(0)
    def observe(self, now, event, commands):
        self.seen[-1] += 1

@hookimpl
def seer_make_observer():
    return Watcher()
"""


def test_a_plug_in_that_decides_and_is_no_technique_is_said_to_be_left_out(
    seer, distribution, write_config, write_prompts
):
    distribution("watcher", WATCHER)
    path = write_config((*TECHNIQUES, "vanilla_sd", "watcher"), SIM + "[rollout]\nn = 2\nmax_tokens = 8\n")
    assert left_out(load_config(path)) == ["vanilla_sd"]
    result = seer("compare", path, "--prompts", write_prompts({"prompt": "a"}))
    assert result.exit_code == 0, result.output
    told = [line for line in result.stderr.splitlines() if line.startswith("not compared")]
    assert told == ["not compared: 'vanilla_sd'; to compare it too, name it in [compare].techniques"]
    path = write_config((*TECHNIQUES, "vanilla_sd"), "[compare]\ntechniques = ['vanilla_sd']")
    assert left_out(load_config(path)) == ["context_sched"]  # the oracle's arm has divided_rollout
