"""Figures for Prometheus: what events count, where they are served, and the board that shows them."""

import asyncio
import json
import re
import socket
import urllib.request
from importlib.resources import files
from itertools import combinations

import pytest
from prometheus_client import generate_latest
from seer_host.ports import reserved_port
from seer_prometheus.exposition import Exposition
from seer_prometheus.metrics import Metrics

from seer_core.errors import ConfigError
from seer_core.model import InstanceInfo
from seer_core.model.events import (
    AskEnvironment,
    ChunkFinished,
    Complete,
    Dispatch,
    EnvironmentAnswered,
    GroupSpec,
    GroupsSubmitted,
    InstanceDegraded,
    InstanceLeaving,
    InstanceLost,
    InstanceReported,
    InstanceStarted,
    InstanceStopped,
    ResumedResponse,
)
from tests.support.patience import PATIENCE_S


@pytest.fixture
def figures(read_exposition):
    """Metrics, and a function that returns the value of one of instance ``i``."""
    metrics = Metrics()

    def value(name, **more):
        found, _ = read_exposition(generate_latest(metrics.registry).decode())
        return found[f"seer_{name}"][tuple(sorted({"engine": "i", **more}.items()))]

    return metrics, value


def test_time_in_steps_counts_on_when_an_instance_begins_anew(figures):
    metrics, value = figures
    for event in (
        InstanceReported("i", 3, 1, 0.5, stepping_s=10.0, drafting_s=2.0),
        InstanceReported("i", 2, 0, 0.25, stepping_s=14.0, drafting_s=3.0),
        InstanceLost("i", "killed"),
        InstanceReported("i", 1, 0, 0.1, stepping_s=5.0, drafting_s=1.0),
    ):
        metrics.observe(1.0, event, [])
    assert value("instance_step_seconds_total") == 19.0
    assert value("instance_drafting_seconds_total") == 4.0
    assert value("instance_losses_total") == 1
    assert value("instance_running_requests") == 1


def test_counters_of_an_instance_begin_at_0_so_that_its_first_loss_is_an_increase(
    figures,
):
    metrics, value = figures
    metrics.observe(0.0, InstanceStarted(InstanceInfo("i", 64, 16, 4, 64)), [])
    for name in ("instance_losses_total", "chunk_failures_total", "generated_tokens_total"):
        assert value(name) == 0
    for part in ("drafting", "kv_pool"):
        assert value("instance_degradations_total", part=part) == 0


def test_an_instance_that_is_gone_has_nothing_to_do(figures):
    metrics, value = figures
    metrics.observe(0.0, InstanceReported("i", 3, 1, 0.5), [])
    metrics.observe(0.0, InstanceDegraded("i", "drafting", "it failed"), [])
    metrics.observe(1.0, InstanceStopped("i"), [])
    assert value("instance_up") == 0
    assert value("instance_kv_usage_ratio") == 0
    assert value("instance_losses_total") == 0
    assert value("instance_degradations_total", part="drafting") == 1


def test_a_response_counts_with_the_tokens_of_all_its_chunks_and_of_the_process_before(
    figures, read_exposition
):
    metrics, _ = figures
    resumed = (ResumedResponse(30), ResumedResponse(0))
    group = GroupSpec("g", prompt_tokens=4, n=2, max_tokens=100, resumed=resumed)
    metrics.observe(10.0, GroupsSubmitted((group,)), [Dispatch("g/0", "i", 50, 64, True)])
    metrics.observe(12.0, ChunkFinished("g/0", "i", 5, False), [])
    metrics.observe(15.0, ChunkFinished("g/0", "i", 7, True), [Complete("g/0", "stop")])
    metrics.observe(20.0, ChunkFinished("g/1", "i", 1, True), [Complete("g/1", "stop")])
    found, _ = read_exposition(generate_latest(metrics.registry).decode())
    assert found["seer_response_tokens_sum"][()] == 43
    assert found["seer_response_seconds_sum"][()] == 15
    assert found["seer_responses_total"][("finish_reason", "stop"),] == 2
    assert found["seer_migrations_total"][()] == 1
    assert found["seer_generated_tokens_total"][("engine", "i"),] == 13


def test_a_response_does_not_count_with_the_tokens_of_a_rollout_that_failed(figures, read_exposition):
    metrics, _ = figures
    group = GroupsSubmitted((GroupSpec("g", prompt_tokens=4, n=1, max_tokens=100),))
    metrics.observe(10.0, group, [Dispatch("g/0", "i", 50, 64, True)])
    metrics.observe(12.0, ChunkFinished("g/0", "i", 5, False), [])
    asyncio.run(metrics.start())  # as observers are with new strategies
    metrics.observe(20.0, group, [Dispatch("g/0", "i", 50, 64, True)])
    metrics.observe(21.0, ChunkFinished("g/0", "i", 3, True), [Complete("g/0", "stop")])
    found, _ = read_exposition(generate_latest(metrics.registry).decode())
    assert found["seer_response_tokens_sum"][()] == 3
    assert found["seer_generated_tokens_total"][("engine", "i"),] == 8


def test_a_response_counts_with_the_tokens_of_its_environment(figures, read_exposition):
    metrics, _ = figures
    group = GroupSpec("g", prompt_tokens=4, n=1, max_tokens=100, turns=True)
    metrics.observe(10.0, GroupsSubmitted((group,)), [Dispatch("g/0", "i", 50, 64, True)])
    metrics.observe(12.0, ChunkFinished("g/0", "i", 5, True), [AskEnvironment("g/0")])
    metrics.observe(15.0, EnvironmentAnswered("g/0", 20, True), [Complete("g/0", "stop")])
    found, _ = read_exposition(generate_latest(metrics.registry).decode())
    assert found["seer_response_tokens_sum"][()] == 25
    assert found["seer_generated_tokens_total"][("engine", "i"),] == 5


def test_an_instance_that_leaves_takes_no_chunks(figures):
    metrics, value = figures
    metrics.observe(0.0, InstanceStarted(InstanceInfo("i", 64, 16, 4, 64)), [])
    assert value("instance_up") == 1
    metrics.observe(1.0, InstanceLeaving("i", "its node is taken"), [])
    assert value("instance_up") == 0


@pytest.fixture
def port():
    with reserved_port() as one:
        yield one


@pytest.fixture
def served(port, read_exposition):
    """Return a function that reads what this process serves there."""

    def served():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=PATIENCE_S) as answer:
            return read_exposition(answer.read().decode())[0]

    return served


def test_a_run_serves_its_figures_and_a_comparison_those_of_its_latest_arm(
    seer, write_config, write_prompts, tmp_path, port, served
):
    config = write_config(
        ["divided_rollout", "prometheus"],
        f"[rollout]\nn = 2\nmax_tokens = 8\n[plugin.prometheus]\nport = {port}\n",
    )
    prompts = write_prompts({"prompt": "a"}, {"prompt": "b"})
    result = seer("run", config, "--prompts", prompts, "--out", tmp_path / "out")
    assert result.exit_code == 0, result.output
    tokens = json.loads((tmp_path / "out/summary.json").read_text())["tokens"]
    found = served()
    assert (
        sum(found["seer_generated_tokens_total"].values()) == found["seer_response_tokens_sum"][()] == tokens
    )
    assert sum(found["seer_responses_total"].values()) == 4
    result = seer("compare", config, "--prompts", prompts)
    assert result.exit_code == 0, result.output
    assert sum(served()["seer_responses_total"].values()) == 4


def test_the_address_of_an_engine_s_own_figures_is_named_while_the_instance_is_up(port, served):
    def targets():
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/targets", timeout=PATIENCE_S) as answer:
            assert answer.headers["Content-Type"] == "application/json"
            return json.load(answer)

    def start(address):
        info = InstanceInfo("vllm-0", 64, 16, 4, 64, metrics_address=address)
        metrics.observe(0.0, InstanceStarted(info), [])

    metrics = Exposition.at("127.0.0.1", port).add(Metrics())
    assert targets() == []
    start("http://127.0.0.1:4001/metrics")
    assert targets() == [{"targets": ["127.0.0.1:4001"], "labels": {"engine": "vllm-0"}}]
    metrics.observe(1.0, InstanceLost("vllm-0", "killed"), [])
    assert targets() == []
    start("http://[fd00::1]:4002/metrics")
    assert targets() == [{"targets": ["[fd00::1]:4002"], "labels": {"engine": "vllm-0"}}]
    labels = ("address", "http://[fd00::1]:4002/metrics"), ("engine", "vllm-0")
    assert served()["seer_instance_metrics_info"] == {labels: 1}


def test_a_port_that_is_taken_ends_a_run_at_its_start(seer, write_config, write_prompts, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as one:
        config = write_config(["prometheus"], f"[plugin.prometheus]\nport = {one.getsockname()[1]}\n")
        result = seer("run", config, "--prompts", write_prompts({"prompt": "a"}), "--out", tmp_path / "out")
    assert result.exit_code == 2, result.output
    assert "choose another port" in result.stderr


def test_an_address_that_is_none_is_named(port):
    with pytest.raises(ConfigError, match=r"cannot serve figures at 192\.0\.2\.1:"):
        Exposition.at("192.0.2.1", port)


def test_the_board_shows_figures_that_there_are_and_no_panel_lies_on_another():
    board = json.loads((files("seer_prometheus") / "grafana.json").read_text())
    names = {sample.name for family in Metrics().registry.collect() for sample in family.samples}
    names |= {
        f"{family.name}{suffix}"
        for family in Metrics().registry.collect()
        for suffix in ("", "_total", "_bucket")
    }
    asked = set()
    for panel in board["panels"]:
        assert panel["targets"], panel["title"]
        for target in panel["targets"]:
            asked |= set(re.findall(r"\bseer_\w+", target["expr"]))
    assert len(asked) > 12
    assert asked <= names
    places = [panel["gridPos"] for panel in board["panels"]]
    for a, b in combinations(places, 2):
        beside = a["x"] + a["w"] <= b["x"] or b["x"] + b["w"] <= a["x"]
        below = a["y"] + a["h"] <= b["y"] or b["y"] + b["h"] <= a["y"]
        assert beside or below
    assert len({panel["id"] for panel in board["panels"]}) == len(places)
