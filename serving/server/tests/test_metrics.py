"""The server's figures: those of the rollout, in Prometheus' format."""

import httpx
import pytest

PATIENCE_S = 60


@pytest.fixture
def scrape(read_exposition):
    """Return a function that reads the figures of a server."""

    def scrape(served, **headers):
        answer = httpx.get(f"{served.url}/metrics", headers=headers, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        return read_exposition(answer.text)

    return scrape


def ask(served, **fields):
    body = {"prompt": "how far", "max_tokens": 24, "return_token_ids": True, **fields}
    answer = httpx.post(f"{served.url}/v1/completions", json=body, timeout=PATIENCE_S)
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"]


def test_they_add_up_to_what_clients_got(serve_sim, scrape):
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


def test_they_and_the_addresses_of_engines_own_need_the_server_s_token(serve_sim, scrape):
    with serve_sim(token="a-token-of-the-run") as served:
        assert httpx.get(f"{served.url}/metrics").status_code == 401
        assert httpx.get(f"{served.url}/targets").status_code == 401
        answer = httpx.get(f"{served.url}/targets", headers={"Authorization": "Bearer a-token-of-the-run"})
        assert (answer.json(), answer.headers["Content-Type"]) == ([], "application/json")
        scrape(served, Authorization="Bearer a-token-of-the-run")
