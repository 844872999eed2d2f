"""A simulated run is a function of its configuration: its trace is the same twice, and replays."""

import asyncio
from pathlib import Path

import msgspec
import pytest
from seer_host.config_files import make_config
from seer_session.assembly import assemble, fill_slots
from seer_session.runtime import Runtime
from seer_trace.records import TraceWriter, read_trace, replay

from seer_core.errors import SeerError
from seer_core.plugins.slots import Assembly
from seer_core.scheduling.scheduler import CORE, Scheduler, Slot

TABLES = {
    "seer": {
        "engine": "sim",
        "kv_pool": "sim_pool",
        "plugins": ["divided_rollout", "context_sched", "grouped_spec"],
    },
    "engine": {
        "sim": {
            "preset": "h800-moonlight",
            "instances": 3,
            "kv_capacity_tokens": 8192,
            "max_model_tokens": 4096,
            "lengths": {"mean_tokens": 900, "sigma": 1.0, "group_share": 0.6, "cap_tokens": 3500},
            "kill_at_s": [{"instance": "sim-1", "at_s": 20, "restart_after_s": 30}],
        }
    },
    "plugin": {"divided_rollout": {"chunk_tokens": 256}},
}


@pytest.fixture
def run(tmp_path):
    """Return a function: roll out 16 groups of 8 and return the trace's file and the result."""

    def play(name, seed=0, **tables):
        config = make_config({**TABLES, **tables}, base_dir=Path(), origin="test")
        config = msgspec.structs.replace(config, seer=msgspec.structs.replace(config.seer, seed=seed))
        assembly = assemble(config)
        trace = TraceWriter(tmp_path / name)
        strategies = assembly.strategies
        observers = (*strategies.observers, Slot("observer", CORE, trace))
        strategies = type(strategies)(strategies.policies, observers, strategies.drafter)
        prompts = [
            {"group_id": f"g{n}", "prompt_token_ids": list(range(3, 40 + n)), "n": 8, "max_tokens": 3500}
            for n in range(16)
        ]

        async def roll_out():
            async with Runtime(
                Assembly(assembly.fleet, strategies, assembly.kv_pool), config.seer
            ) as runtime:
                return await runtime.rollout(runtime.groups(prompts)).wait()

        result = asyncio.run(roll_out())
        trace.close()
        return tmp_path / name, result, config

    return play


def test_two_runs_with_one_seed_leave_the_same_bytes(run):
    first, result, _ = run("first.jsonl")
    second, again, _ = run("second.jsonl")
    assert first.read_bytes() == second.read_bytes()
    assert msgspec.json.encode(result, enc_hook=list) == msgspec.json.encode(again, enc_hook=list)
    # Everything that could disturb the order took part.
    assert result.summary.instances_lost == 1
    assert result.summary.pool_tokens > 0
    assert result.summary.accepted_tokens > 0
    assert result.summary.migrations > 0


def test_another_seed_leaves_another_trace(run):
    assert run("first.jsonl")[0].read_bytes() != run("second.jsonl", seed=1)[0].read_bytes()


def test_a_trace_s_events_lead_a_fresh_scheduler_to_the_same_commands(run):
    path, _, config = run("trace.jsonl")
    assert replay(path, Scheduler(fill_slots(config).policies)) == len(list(read_trace(path)))


def test_a_scheduler_with_other_settings_decides_otherwise(run):
    path, _, config = run("trace.jsonl")
    other = config.with_plugins(("divided_rollout",))
    with pytest.raises(SeerError, match="replay differs at record"):
        replay(path, Scheduler(fill_slots(other).policies))
