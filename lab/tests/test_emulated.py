"""The second table of a comparison: the same responses give it on any machine, however busy it is."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from seer_cli import emulation
from seer_cli.comparison import arms_of
from seer_cli.emulation import WrittenResponses, find_emulator
from seer_host.config_files import make_config

from seer_core.errors import ConfigError
from seer_core.model import InstanceInfo, PromptGroup

SETTINGS = """
[seer]
plugins = ["divided_rollout", "context_sched", "grouped_spec"]
engine = "sim"
kv_pool = "sim_pool"
[plugin.divided_rollout]
chunk_tokens = 64
[engine.sim]
max_running = 8
kv_capacity_tokens = 2048
max_model_tokens = 1024
lengths = { mean_tokens = 150, sigma = 0.8, group_share = 0.5, cap_tokens = 400 }
[rollout]
n = 4
max_tokens = 400
[compare.emulated]
on = ["qwen2-vl-72b", "qwen3-32b"]
set = ["plugin.divided_rollout.chunk_tokens='auto'"]
"""
FEW = ("--set", "compare.techniques=['divided_rollout']")


@pytest.fixture
def files(tmp_path):
    """A config and prompts of a small comparison."""
    pytest.importorskip("seer_grouped_spec._index")
    config, prompts = tmp_path / "config.toml", tmp_path / "prompts.jsonl"
    config.write_text(SETTINGS)
    prompts.write_text("".join(json.dumps({"prompt_token_ids": [5] * 8}) + "\n" for _ in range(6)))
    return config, prompts


@pytest.fixture
def compared(seer, files, tmp_path):
    """Return a function that compares, and returns what is printed and the arms as JSON."""
    config, prompts = files

    def run(*options):
        out = tmp_path / "compare.json"
        result = seer(
            "compare", config, "--prompts", prompts, "--json", out, "--log-level", "error", *options
        )
        assert result.exit_code == 0, result.output
        return result.stdout, json.loads(out.read_text())

    return run


def second_table(printed):
    return printed.partition("The same 24 responses")[2]


def emulated_of(arm, on="qwen2-vl-72b"):
    return arm["emulated"][on]


def test_the_same_responses_give_the_same_table_on_a_machine_of_another_speed(compared):
    printed, arms = compared()
    again, slower = compared("--set", "engine.sim.cost={overhead_s=0.02}")
    assert slower[0]["total_time_s"] > 2 * arms[0]["total_time_s"]
    assert [arm["tokens"] for arm in slower] == [arm["tokens"] for arm in arms]
    assert [arm["emulated"] for arm in slower] == [arm["emulated"] for arm in arms]
    assert second_table(printed) == second_table(again)
    for arm in arms:
        assert emulated_of(arm)["over_bound"] >= 1
        assert emulated_of(arm)["total_time_s"] != pytest.approx(arm["total_time_s"], rel=0.1)
        assert emulated_of(arm, "qwen3-32b")["total_time_s"] < emulated_of(arm)["total_time_s"]
    sources = ("docs/results/reproduction.md", "docs/results/predictions.md", "docs/results/gpu.md")
    for name in ("over its bound", *sources, "8 H800", "4 H100"):
        assert name in second_table(printed)


def test_settings_for_the_engines_at_hand_may_differ_on_the_emulated_ones(compared):
    _, arms = compared(*FEW)
    _, others = compared(*FEW, "--set", "compare.emulated.set=[]")
    assert others[1]["chunks"] == arms[1]["chunks"]
    assert emulated_of(others[1])["chunks"] != emulated_of(arms[1])["chunks"]


def written(config, texts):
    """Return groups of four responses with these texts, on two instances."""
    groups, tokens = [], {}
    for number, text in enumerate(texts):
        groups.append(PromptGroup(f"g{number}", (7, 8, 9), n=4, max_tokens=400, seed=number))
        tokens |= {f"g{number}/{index}": text[: len(text) - 9 * index] for index in range(4)}
    infos = [InstanceInfo(f"vllm-{each}", 2048, 16, 8, 1024) for each in range(2)]
    return WrittenResponses(groups, tokens, dict.fromkeys(tokens, False), arms_of(config), infos)


@pytest.fixture
def config(files):
    return make_config(tomllib.loads(SETTINGS), base_dir=Path(), origin="a test")


def test_drafts_are_worth_what_the_texts_say_and_no_arm_is_faster_than_its_bound(config):
    alike = [[10 + number * 31 + at % (20 + number) for at in range(300)] for number in range(5)]
    responses = written(config, alike)
    emulate = find_emulator(config)
    emulated = emulate(responses)[0]
    arms = {arm.name: arm for arm in emulated.arms}
    assert arms["+ grouped_spec"].figures["acceptance_length"] > 1.5
    assert arms["+ grouped_spec"].figures["total_time_s"] < arms["+ context_sched"].figures["total_time_s"]
    assert arms["+ grouped_spec"].bound_s < arms["+ context_sched"].bound_s
    assert all(arm.over_bound >= 1 for arm in emulated.arms)
    backwards = dict(reversed(responses.tokens.items()))
    again = WrittenResponses(responses.groups, backwards, responses.cut, responses.arms, responses.instances)
    assert emulate(again)[0] == emulated


def test_texts_that_have_nothing_in_common_are_worth_no_drafts(config):
    different = [[1000 * number + at for at in range(200)] for number in range(3)]
    responses = written(config, different)
    for name, text in responses.tokens.items():
        text[:] = [each + 100_000 * int(name[-1]) for each in text]
    arms = {arm.name: arm for arm in find_emulator(config)(responses)[0].arms}
    assert arms["+ grouped_spec"].figures["acceptance_length"] == 1
    assert arms["+ grouped_spec"].bound_s == pytest.approx(arms["+ context_sched"].bound_s, rel=0.1)


def test_what_is_asked_for_is_checked_before_engines_start(seer, files):
    config, prompts = files

    def complaint(*options):
        result = seer("compare", config, "--prompts", prompts, *options)
        assert result.exit_code == 2, result.output
        assert "starting" not in result.stderr
        return " ".join(result.stderr.split())

    said = complaint("--set", "compare.emulated.on=['qwen2-vl-27b']")
    assert re.search(r"\[compare.emulated\].on names 'qwen2-vl-27b': .*did you mean 'qwen2-vl-72b'", said)
    assert "chunk_token" in complaint(
        "--set", "compare.emulated.set=['plugin.divided_rollout.chunk_token=3']"
    )


def test_a_model_that_there_is_not_is_named(config):
    other = make_config(
        tomllib.loads(SETTINGS), ["compare.emulated.on=['gpt']"], base_dir=Path(), origin="a test"
    )
    with pytest.raises(ConfigError, match=r"there is no such model.*; there are moonlight, .*kimi-k2"):
        find_emulator(other)


def test_without_the_laboratory_a_line_says_what_to_install(compared, monkeypatch):
    monkeypatch.setattr(emulation, "offered", lambda group: ())
    printed, arms = compared(*FEW)
    [line] = [line for line in printed.splitlines() if "seer-lab" in line]
    assert re.fullmatch(r"no table of \[compare.emulated\], for which seer-lab .*: run .+", line)
    assert "emulated" not in arms[0]
