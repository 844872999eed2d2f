"""The laboratory on paced vLLM: the simulator's workloads and policies, and nearly its times."""

import json

import pytest
from click.testing import CliRunner
from seer_lab.cli import sim_command
from seer_lab.lengths import DrawnLengths
from seer_lab.paced import paced as emulated
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.workloads import CLUSTERS, crowded

pytestmark = pytest.mark.engine

LENGTHS = DrawnLengths(8, 4, 200, 1000, sigma=0.9, group_share=0.5, prompt_tokens=64)


@pytest.mark.parametrize("policy", ["verl", "divided", "context", "oracle"])
def test_the_simulator_takes_as_long_as_the_real_scheduler(policy):
    """Three rollouts together: in one of 32 responses, a block evicted sooner may move the end by 6 %.

    KV is full where half of each chunk is reserved, so the two differ by up to 4 % in all three as well.
    """
    pytest.importorskip("vllm")
    load = crowded("small", LENGTHS, CLUSTERS["qwen2-vl-72b"], instances=2, pressure=3.0)
    paced, simulated = (
        [simulate(load, POLICIES[policy], seed, engine=engine) for seed in range(3)]
        for engine in ("paced", "sim")
    )
    for one, other in zip(paced, simulated, strict=True):
        assert one.summary.tokens == other.summary.tokens
        assert one.summary.total_time_s == pytest.approx(other.summary.total_time_s, rel=0.1)
        assert (one.summary.preemptions > 0) == (other.summary.preemptions > 0)
    totals, lates = (
        [sum(value(each) for each in runs) for runs in (paced, simulated)]
        for value in (lambda each: each.summary.total_time_s, lambda each: each.late_start_share)
    )
    assert totals[0] == pytest.approx(totals[1], rel=0.05)
    assert lates[0] == pytest.approx(lates[1], abs=0.15)


def test_settings_of_the_paced_engine_are_kept_but_for_its_clock_and_script():
    load = crowded("small", LENGTHS, CLUSTERS["qwen2-vl-72b"], instances=2, pressure=3.0)
    given = {"uniform_drafts": "true", "clock": "real", "script": "texts.jsonl"}
    config = load.config((), [f"engine.paced.{name}={value}" for name, value in given.items()], 0)
    table = emulated(config, "vllm").engine["paced"]
    assert (table["uniform_drafts"], table["clock"], table["script"]) == (True, "virtual", "")


def test_the_command_says_what_is_real_and_what_is_not(tmp_path):
    pytest.importorskip("vllm")
    file = tmp_path / "rows.json"
    small = [f"--lengths={name}" for name in ("groups=3", "group_size=2", "mean_tokens=20", "cap_tokens=50")]
    arguments = ["synthetic", "--engine", "paced", *small, "--policy", "context", "--json", str(file)]
    result = CliRunner().invoke(sim_command, arguments, catch_exceptions=False)
    assert result.exit_code == 0
    words = " ".join(result.stdout.split())
    assert "real vLLM scheduler, emulated accelerator, scripted text" in words
    assert json.loads(file.read_text())[0]["engine"] == "paced"
