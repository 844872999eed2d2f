"""``seer sweep``: ratios of policies over pressure, lengths and settings."""

import json
import sys

import pytest
from seer_lab.policies import POLICIES
from seer_lab.simulate import simulate
from seer_lab.sweep import parse_axis, sweep, swept_workloads
from seer_lab.workload_choice import choose_workload

from seer_core.errors import ConfigError

SMALL = ("groups=12", "group_size=4", "mean_tokens=300", "cap_tokens=1200", "prompt_tokens=20")
OF_SMALL = [word for each in SMALL for word in ("--lengths", each)]
CHUNKS = "plugin.divided_rollout.chunk_tokens"


def test_a_point_is_what_a_simulation_of_it_says():
    axes = {"pressure": [1.5, 3], "sigma": [0.5]}
    policies = [POLICIES["verl"], POLICIES["context"]]
    points = sweep(swept_workloads("synthetic", axes, (), lengths=SMALL, instances=2), policies, (0, 1))
    assert [point.at for point in points] == [{"pressure": 1.5, "sigma": 0.5}, {"pressure": 3, "sigma": 0.5}]
    workload = choose_workload("synthetic", lengths=(*SMALL, "sigma=0.5"), instances=2, pressure=3)
    alone = {
        policy.name: [simulate(workload, policy, seed).throughput_tokens_per_s for seed in (0, 1)]
        for policy in policies
    }
    assert points[1].throughput_tokens_per_s == alone
    ratios = [mine / base for mine, base in zip(alone["context"], alone["verl"], strict=True)]
    assert points[1].ratio("context") == (sum(ratios) / 2, min(ratios), max(ratios))
    assert points[0].throughput_tokens_per_s != alone


def test_a_setting_can_be_swept():
    axes = {CHUNKS: [64, 1024]}
    points = sweep(
        swept_workloads("synthetic", axes, (), lengths=SMALL, instances=2), [POLICIES["divided"]], (0,)
    )
    assert points[0].throughput_tokens_per_s != points[1].throughput_tokens_per_s


@pytest.mark.parametrize("keys", [("pressure=1,4",), ("pressure=1,4", "sigma=0.3,0.9")])
def test_the_command_prints_draws_and_writes(seer, tmp_path, keys):
    over = [word for key in keys for word in ("--over", key)]
    files = ("--plot", tmp_path / "a.svg", "--json", tmp_path / "a.json")
    result = seer("sweep", "synthetic", *OF_SMALL, "--repeat", "2", *over, *files)
    assert result.exit_code == 0, result.output
    points = json.loads((tmp_path / "a.json").read_bytes())
    assert len(points) == 2 ** len(keys)
    for point in points:
        assert f"{point['policies']['context']['ratio_to_first']['median']:.2f}" in result.output
    assert (tmp_path / "a.svg").read_bytes().startswith(b"<?xml")


def test_values_are_numbers_or_words():
    assert parse_axis("pressure=0.5,1") == ("pressure", [0.5, 1])
    assert parse_axis(f"{CHUNKS}=auto,512") == (CHUNKS, ["auto", 512])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "Missing option '--over'"),
        (("--over", "pressure"), "give KEY=VALUE,VALUE"),
        (("--over", "pressure=1,1"), "1 is there twice"),
        (("--over", "pressure=0"), "--over pressure=0: 0.0 is not in the range"),
        (("--over", "pressure=x"), "--over pressure=x: 'x' is not a valid float"),
        (("--over", "pressure=1", "--over", "pressure=2"), "or twice with two keys"),
        (("--over", "pressure=1", "--pressure", "2"), "pressure is swept and given"),
        (("--over", "sigma=1", "--lengths", "sigma=2"), "sigma is swept and given"),
        (("--over", "sigmas=1"), "unknown key 'sigmas' in [lengths]"),
        (("--over", f"{CHUNKS}s=1"), "chunk_tokenss"),
        (("--over", "scale=1"), "--scale does not go with synthetic"),
        (("--over", "pressure=1", "--policy", "verl"), "name two policies at least"),
        (("--over", "pressure=1", "--plot", "a.pdf"), "name a .svg or a .png file"),
    ],
)
def test_what_cannot_be_swept_is_a_sentence(seer, tmp_path, monkeypatch, arguments, message):
    monkeypatch.chdir(tmp_path)
    result = seer("sweep", "synthetic", *arguments)
    assert result.exit_code == 2, result.output
    assert message in result.stderr


def test_a_recording_needs_an_iteration_for_each_seed(seer, tmp_path):
    trace = tmp_path / "lengths.jsonl"
    trace.write_text('{"group": "a", "prompt_tokens": 3, "output_tokens": [4, 5]}\n')
    result = seer("sweep", trace, "--over", "pressure=1,2", "--repeat", "2")
    assert result.exit_code == 2
    assert "holds 1 iteration; leave --repeat out" in result.stderr


def test_without_matplotlib_it_says_how_to_get_it(seer, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "seer_lab.sweep_picture", None)
    result = seer("sweep", "synthetic", "--over", "pressure=1", "--plot", tmp_path / "a.png")
    assert result.exit_code == 2
    assert "needs matplotlib" in result.stderr


def test_a_swept_key_that_is_wrong_is_found_before_any_simulation():
    with pytest.raises(ConfigError, match="lengths"):
        swept_workloads("synthetic", {"sigma": [0.5, "much"]}, ())
