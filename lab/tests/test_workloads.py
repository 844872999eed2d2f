"""Workloads: the paper's sizes, crowding, scaling, and what the command line can say."""

import msgspec
import pytest
from seer_lab.emulated import dearer
from seer_lab.lengths import DrawnLengths, GroupLengths
from seer_lab.workload_choice import choose_workload
from seer_lab.workloads import (
    CLUSTERS,
    NODE_DRAM_BYTES,
    NODE_SSD_BYTES,
    SYNTHETIC,
    WORKLOADS,
    cluster_of,
    crowded,
    scaled,
)
from seer_sim.machines import GPUS, TYPICAL
from seer_sim.pool import Settings
from seer_sim.presets import PRESETS
from seer_sim.published import CONFIGS
from seer_sim.sizes import sizes_of

from seer_core.errors import ConfigError

LINE = '{"group": 1, "prompt_tokens": 30, "output_tokens": [70, 170]}\n'


@pytest.mark.parametrize(
    ("name", "requests", "size", "longest", "mean", "instances", "kv_tokens"),
    [
        ("moonlight", 3200, 8, 65536, 22386, 32, 1_029_000),
        ("qwen2-vl-72b", 9600, 16, 40960, 7615, 16, 1_117_000),
        ("kimi-k2", 6400, 8, 98304, 38959, 8, 9_969_000),
    ],
)
def test_the_paper_s_workloads(name, requests, size, longest, mean, instances, kv_tokens):
    lengths = WORKLOADS[name].lengths
    assert (lengths.groups * lengths.group_size, lengths.group_size) == (requests, size)
    assert (lengths.cap_tokens, lengths.mean_tokens) == (longest, mean)
    engine = WORKLOADS[name].tables["engine"]["sim"]
    assert engine["instances"] == instances
    assert engine["kv_capacity_tokens"] == pytest.approx(kv_tokens, rel=1e-3)
    assert engine["kv_capacity_tokens"] % engine["block_tokens"] == 0


def test_memory_that_is_not_the_engine_s_is_missing_from_kv_alone():
    cluster = CLUSTERS["qwen2-vl-72b"]
    less = msgspec.structs.replace(cluster, memory_share=0.7)
    missing = (cluster.kv_capacity_tokens - less.kv_capacity_tokens) * cluster.kv_bytes_per_token
    assert missing == pytest.approx(8 * 80e9 * 0.1, rel=1e-3)


def test_windows_and_states_of_running_requests_are_missing_from_kv_and_bound_their_number():
    gpu = GPUS["h100"]
    plain = sizes_of(CONFIGS["Qwen/Qwen3-32B"])
    small = msgspec.structs.replace(plain, window_bytes=1e6, state_bytes=2e6)
    expected, found = (cluster_of(each, gpu, "H100", 4) for each in (plain, small))
    missing = (expected.kv_capacity_tokens - found.kv_capacity_tokens) * plain.kv_bytes_per_token
    assert missing == pytest.approx(found.max_running * (1e6 + 2 * 2e6), rel=0.01)
    large = cluster_of(msgspec.structs.replace(plain, state_bytes=1e9), gpu, "H100", 4)
    assert large.max_running == int(large.free_bytes / 2 / 2e9) < expected.max_running
    assert large.kv_capacity_tokens >= expected.kv_capacity_tokens // 2
    moved_s = found.cost.request_s - expected.cost.request_s
    assert moved_s == pytest.approx((1e6 + 2 * 2e6) / (4 * gpu.bytes_per_s * TYPICAL.kv))


def test_a_crowded_workload_has_so_much_kv_that_responses_fill_it_so_often():
    lengths = DrawnLengths(50, 8, 4000, 16000, sigma=0.8, group_share=0.5, prompt_tokens=500)
    workload = crowded("mine", lengths, CLUSTERS["moonlight"], 2, 3.0)
    contexts = sum(500 + tokens for group in workload.groups(0) for tokens in group.output_tokens)
    engine = workload.tables["engine"]["sim"]
    assert contexts / (2 * engine["kv_capacity_tokens"]) == pytest.approx(3.0, rel=1e-3)


def test_an_instance_has_room_for_the_longest_response_of_all_iterations():
    iterations = [[GroupLengths("a", 10, (20,), 20)], [GroupLengths("a", 10, (20,), 900)]]
    engine = crowded("mine", iterations, CLUSTERS["moonlight"], 4, 3.0).tables["engine"]["sim"]
    assert (engine["kv_capacity_tokens"], engine["max_model_tokens"]) == (912, 910)


def test_the_pool_has_the_memory_and_the_disks_of_the_machines_that_the_instances_fill():
    lengths = [[GroupLengths("a", 10, (20,), 20)]]
    on_half_nodes, on_quarters = CLUSTERS["qwen3-32b"], CLUSTERS["moonlight"]
    assert (on_half_nodes.gpus_per_instance, on_quarters.gpus_per_instance) == (4, 1)
    for workload, nodes in (
        (crowded("mine", lengths, on_half_nodes, 4, 3.0), 2),
        (crowded("mine", lengths, on_quarters, 2, 3.0), 1 / 4),
        (WORKLOADS["qwen2-vl-72b"], 16),
        (scaled(WORKLOADS["qwen2-vl-72b"], 0.25), 4),
    ):
        pool = workload.tables["kv_pool"]["sim_pool"]
        assert (pool["dram_bytes"], pool["ssd_bytes"]) == (nodes * NODE_DRAM_BYTES, nodes * NODE_SSD_BYTES)


def test_contexts_that_are_shorter_and_dearer_take_as_long_to_come_from_memory_and_from_disk():
    tables = crowded("mine", SYNTHETIC, CLUSTERS["qwen3-32b"], 4, 3.0).tables
    constants, rates = PRESETS["h100-qwen3-32b-tp4"], Settings()
    whole, short = tables["kv_pool"]["sim_pool"], dearer(tables, 8)
    per_token = short["engine"]["sim"]["cost"]["kv_bytes_per_token"]
    pool = short["kv_pool"]["sim_pool"]
    for rate, of_whole in (
        (pool["bandwidth_bytes_per_s"], whole["bandwidth_bytes_per_s"]),
        (pool["ssd_bytes_per_s"], rates.ssd_bytes_per_s),
    ):
        assert 500 * per_token / rate == pytest.approx(8 * 500 * constants.kv_bytes_per_token / of_whole / 8)
    assert pool["latency_s"] == rates.latency_s / 8


def test_the_length_of_chunks_is_left_to_the_plug_in():
    for workload in (*WORKLOADS.values(), crowded("mine", SYNTHETIC, CLUSTERS["moonlight"], 4, 3.0)):
        assert "divided_rollout" not in workload.tables["plugin"]


def test_a_scaled_workload_is_as_crowded():
    whole, quarter = WORKLOADS["qwen2-vl-72b"], scaled(WORKLOADS["qwen2-vl-72b"], 0.25)
    assert quarter.lengths.groups == whole.lengths.groups / 4
    assert quarter.tables["engine"]["sim"]["instances"] == 4
    assert scaled(whole, 0.001).tables["engine"]["sim"]["instances"] == 1


def test_seeds_take_recorded_iterations_in_turn(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(LINE + LINE.replace("{", '{"iteration": 1, ', 1).replace("70,", "71,"))
    workload = choose_workload(str(path))
    firsts = [workload.groups(seed)[0].output_tokens[0] for seed in range(3)]
    assert firsts == [70, 71, 70]
    assert workload.groups(0, later=1) == workload.groups(1)


def test_lengths_can_be_changed_by_name():
    workload = choose_workload("synthetic", lengths=["sigma=0", "mean_tokens=100", "groups=3"])
    assert [group.output_tokens for group in workload.groups(0)] == [(100,) * 8] * 3


@pytest.mark.parametrize(
    ("name", "options", "words"),
    [
        ("moonlihgt", {}, "neither a workload nor a file; did you mean 'moonlight'"),
        ("moonlight", {"on": "kimi-k2"}, "--on does not go with moonlight"),
        ("moonlight", {"pressure": 2.0}, "--pressure does not go with moonlight"),
        ("moonlight", {"where": ["a=b"]}, "--where does not go with moonlight"),
        ("synthetic", {"scale": 0.5}, "--scale does not go with synthetic"),
        ("synthetic", {"on": "h100"}, "--on h100: no such engines"),
        ("synthetic", {"lengths": ["sigma"]}, "give KEY=VALUE"),
        ("synthetic", {"lengths": ["sgima=1"]}, "did you mean 'sigma'"),
        ("synthetic", {"lengths": ["sigma=wide"]}, r"\[lengths\].sigma: expected `float`, got `str`"),
        ("synthetic", {"lengths": ["groups=0"]}, r"\[lengths\].groups: expected `int` >= 1"),
        ("synthetic", {"lengths": ["mean_tokens=1e6"]}, "exceeds cap_tokens = 16384"),
    ],
)
def test_what_does_not_go_together_is_refused(name, options, words):
    with pytest.raises(ConfigError, match=words):
        choose_workload(name, **options)


def test_recorded_lengths_cannot_be_changed(tmp_path):
    path = tmp_path / "lengths.jsonl"
    path.write_text(LINE)
    with pytest.raises(ConfigError, match="--lengths does not go with"):
        choose_workload(str(path), lengths=["sigma=1"])


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("rollout.n=3", "prompts come with the workload"),
        ("compare.baseline=[]", "--policy"),
        ('seer.plugins=["a"]', "--policy"),
        ("engine.sim.lengths.sigma=2", "--lengths"),
        ("seer.engine=vllm", "seer compare"),
    ],
)
def test_overrides_without_effect_are_refused(override, words):
    with pytest.raises(ConfigError, match=words):
        WORKLOADS["moonlight"].config((), [override])


def test_overrides_change_one_configuration_and_not_the_workload():
    changed = WORKLOADS["moonlight"].config(("divided_rollout",), ["engine.sim.instances=3"], seed=5)
    assert changed.engine["sim"]["instances"] == 3
    assert (changed.seer.plugins, changed.seer.seed) == (("divided_rollout",), 5)
    assert changed.origins["engine.sim.instances"] == "--set engine.sim.instances=3"
    assert changed.origins["engine.sim.preset"] == "workload moonlight"
    assert WORKLOADS["moonlight"].config(()).engine["sim"]["instances"] == 32
