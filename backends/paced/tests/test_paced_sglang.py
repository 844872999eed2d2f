"""Paced SGLang: its own scheduler, the simulator's tokens, and every byte that moves is looked at."""

import asyncio
from pathlib import Path

import pytest
from seer_host.config_files import make_config
from seer_session.assembly import assemble
from seer_session.environment import EnvironmentAnswer
from seer_session.runtime import Runtime

from seer_core.errors import EngineError
from seer_core.model import PromptGroup

pytestmark = pytest.mark.engine

INSTANCES = {"instances": 2, "kv_capacity_tokens": 1024, "max_model_tokens": 512, "max_running": 16}
LENGTHS = {"mean_tokens": 120, "cap_tokens": 400}
PLUGINS = ["divided_rollout", "context_sched"]


class Trace:
    def __init__(self):
        self.lines = []

    def observe(self, now, event, commands):
        self.lines.append(repr((now, event, commands)))


class Dice:
    """An environment whose answers follow from the turns, and come later."""

    async def step(self, trajectory, turn):
        total = sum(turn.token_ids)
        answer = [5 + total % 90] * (1 + total % 40)
        return EnvironmentAnswer(token_ids=answer, done=turn.number == 1 + trajectory.index, delay_s=0.05)


TURNS = {"environment": Dice(), "lengths": {"mean_tokens": 40, "cap_tokens": 400}}
"""Of ``roll_out``, for responses with turns, each some 40 tokens long."""


def roll_out(engine="paced", observer=None, kv_pool="local", plugins=PLUGINS, environment=None, **settings):
    table = {**INSTANCES, "lengths": LENGTHS} | settings
    if engine == "paced":
        table["scheduler"] = "sglang"
    tables = {
        "seer": {"engine": engine, "kv_pool": kv_pool, "plugins": plugins},
        "engine": {engine: table},
    }
    if kv_pool == "local":
        tables["kv_pool"] = {"local": {"capacity_bytes": 1 << 24}}
    if "divided_rollout" in plugins:
        tables["plugin"] = {"divided_rollout": {"chunk_tokens": 48}}
    config = make_config(tables, base_dir=Path(), origin="test")
    assembly = assemble(config).with_observer(*([] if observer is None else [observer]))
    groups = [
        PromptGroup(f"g{g}", tuple(range(10 + g, 60 + g)), 4, table["lengths"]["cap_tokens"], seed=g)
        for g in range(4)
    ]

    async def run():
        async with Runtime(assembly, config.seer, config.rollout) as runtime:
            return await asyncio.wait_for(runtime.rollout(groups, environment=environment).wait(), 240)

    return asyncio.run(run())


def tokens_of(result):
    return {each.request_id: each.token_ids.tolist() for each in result.completions}


@pytest.fixture(scope="module")
def simulated():
    return tokens_of(roll_out("sim", kv_pool="none"))


def test_the_same_run_has_the_same_trace_and_the_simulator_s_tokens(simulated):
    traces = Trace(), Trace()
    first, second = (roll_out(observer=trace) for trace in traces)
    assert traces[0].lines == traces[1].lines
    assert first.summary == second.summary
    assert first.summary.pool_tokens > 0
    assert tokens_of(first) == simulated


def test_steps_go_on_while_a_request_waits_for_its_kv(simulated):
    slow = {"moves": {"latency_s": 0.05, "bandwidth_bytes_per_s": 1e9}}
    traces = Trace(), Trace()
    first, second = (roll_out(**slow, awaited_kv_bytes=0, observer=trace) for trace in traces)
    assert traces[0].lines == traces[1].lines
    stopping = roll_out(**slow)
    assert tokens_of(first) == tokens_of(second) == tokens_of(stopping) == simulated
    assert first.summary.pool_tokens > 0
    assert first.summary.total_time_s < stopping.summary.total_time_s


def test_what_sglang_retracts_is_written_to_the_same_tokens():
    """SGLang expects that running requests write 70 % of what they may; these write nearly all."""
    long = {
        "instances": 1,
        "kv_pool": "none",
        "plugins": ["group_round_robin"],
        "lengths": {"mean_tokens": 580, "sigma": 0.05, "cap_tokens": 600},
        "kv_capacity_tokens": 4096,
        "max_model_tokens": 1024,
    }
    result = roll_out(**long)
    assert result.summary.preemptions > 0
    assert tokens_of(result) == tokens_of(roll_out("sim", **long))


def test_a_killed_instance_costs_time_and_no_token(simulated):
    result = roll_out(kill_at_s=[{"instance": "paced-0", "at_s": 0.2, "restart_after_s": 0.2}])
    assert result.summary.instances_lost == 1
    assert tokens_of(result) == simulated


def test_in_real_time_a_process_of_its_own_writes_the_same():
    result, expected = roll_out(**TURNS, clock="real", instances=1), roll_out("sim", **TURNS, kv_pool="none")
    assert tokens_of(result) == tokens_of(expected)


@pytest.mark.parametrize(
    "settings",
    [
        pytest.param({}, id="pool", marks=pytest.mark.long),
        pytest.param({"kv_pool": "none"}, id="no pool", marks=pytest.mark.long),
        pytest.param(
            {"kill_at_s": [{"instance": "paced-0", "at_s": 0.2, "restart_after_s": 0.2}]}, id="kill"
        ),
    ],
)
def test_what_an_environment_answers_is_a_part_of_the_text_that_follows(settings):
    result, expected = roll_out(**TURNS, **settings), roll_out("sim", **TURNS, kv_pool="none")
    assert tokens_of(result) == tokens_of(expected)
    assert result.summary.turns == expected.summary.turns > 40
    assert result.summary.environment_tokens == expected.summary.environment_tokens > 400
    assert result.summary.instances_lost == ("kill_at_s" in settings)


def test_a_drafter_is_refused():
    with pytest.raises(EngineError, match="does not draft on SGLang's scheduler: take the drafter out"):
        roll_out(plugins=[*PLUGINS, "grouped_spec"])


def test_a_step_may_take_more_tokens_than_a_real_one_would_have_memory_for(simulated):
    assert tokens_of(roll_out(max_batched_tokens=65_536)) == simulated
