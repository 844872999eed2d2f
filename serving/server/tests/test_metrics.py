"""The server's figures: those of the rollout, in Prometheus' format."""

from collections import defaultdict

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from seer_server.metrics import Metrics

from seer_core.model.events import InstanceDegraded, InstanceLost, InstanceReported, InstanceStopped

PATIENCE_S = 60


def scraped(text):
    """Return samples by name and labels, and the kinds of all metrics."""
    found, kinds = defaultdict(dict), {}
    for family in text_string_to_metric_families(text):
        kinds[family.name] = family.type
        for sample in family.samples:
            found[sample.name][tuple(sorted(sample.labels.items()))] = sample.value
    return found, kinds


def scrape(served, **headers):
    answer = httpx.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return scraped(answer.text)


def ask(served, **fields):
    body = {"prompt": "how far", "max_tokens": 24, "return_token_ids": True, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_they_add_up_to_what_clients_got(serve_sim):
    with serve_sim() as served:
        before, kinds = scrape(served)
        assert sum(before["seer_instance_up"].values()) == len(before["seer_instance_up"]) > 0
        choices = ask(served, n=3) + ask(served, n=2)
        after, _ = scrape(served)
    tokens = sum(len(each["token_ids"]) for each in choices)
    assert after["seer_groups_total"][()] == 2
    assert sum(after["seer_responses_total"].values()) == 5
    assert {labels[0][1] for labels in after["seer_responses_total"]} == {
        each["finish_reason"] for each in choices
    }
    assert sum(after["seer_generated_tokens_total"].values()) == tokens
    assert after["seer_response_tokens_sum"][()] == tokens
    assert after["seer_response_tokens_count"][()] == after["seer_response_seconds_count"][()] == 5
    assert after["seer_response_seconds_sum"][()] > 0
    assert sum(after["seer_chunks_total"].values()) >= 5
    assert after["seer_unfinished_requests"][()] == 0
    assert (after["seer_weight_version"][()], after["seer_asleep"][()]) == (0, 0)
    assert kinds["seer_responses"] == "counter"
    assert kinds["seer_instance_kv_usage_ratio"] == "gauge"
    assert kinds["seer_response_seconds"] == "histogram"


def test_they_need_the_server_s_token(serve_sim):
    with serve_sim(token="a-token-of-the-run") as served:
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        scrape(served, Authorization="Bearer a-token-of-the-run")


@pytest.fixture
def figures():
    """Metrics, and a function that returns the value of one of instance ``i``."""
    from prometheus_client import generate_latest

    metrics = Metrics()

    def value(name, **more):
        found, _ = scraped(generate_latest(metrics._registry).decode())
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


def test_an_instance_that_is_gone_has_nothing_to_do(figures):
    metrics, value = figures
    metrics.observe(0.0, InstanceReported("i", 3, 1, 0.5), [])
    metrics.observe(0.0, InstanceDegraded("i", "drafting", "it failed"), [])
    metrics.observe(1.0, InstanceStopped("i"), [])
    assert value("instance_up") == 0
    assert value("instance_kv_usage_ratio") == 0
    assert value("instance_losses_total") == 0
    assert value("instance_degradations_total", part="drafting") == 1
