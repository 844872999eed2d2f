"""The scheduler in front of servers fails, stalls, is off, or is compared: the servers write without it."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from aiohttp import web
from seer_context_sched.prioritizer import ContextAware
from seer_host.config_files import make_config
from seer_server import make_app, servers
from seer_server.broker import Trust
from seer_session.runtime import Runtime

from seer_core.errors import ConfigError
from tests.support.eventually import eventually

PATIENCE_S = 60
PROMPT = [1, 2, 3, 4, 5]
LONG = {"sampling_params": {"max_tokens": 400, "temperature": 1.0, "seed": 7, "top_k": 0, "logprobs": 0}}
"""Sampling of a stand-in that takes nothing by default."""


class Fault:
    """A strategy that fails, or says that nothing waits, from a number of its decisions on."""

    def __init__(self) -> None:
        self.kind = ""
        self.after = 0


@pytest.fixture
def fault(monkeypatch):
    found = Fault()
    take, peek = ContextAware.take, ContextAware.peek

    def taken(self, request):
        if found.kind == "fails":
            found.after -= 1
            if found.after < 0:
                raise ValueError("it has lost its queue")
        take(self, request)

    monkeypatch.setattr(ContextAware, "take", taken)
    monkeypatch.setattr(ContextAware, "peek", lambda self: None if found.kind == "stalls" else peek(self))
    return found


@pytest.fixture
def front(fake, serving, tmp_path):
    """Return a function that makes a server in front of two stand-ins, and these."""

    def make(off: bool = False, **trust: Any):
        fakes = [fake() for _ in range(2)]
        config = make_config(
            {
                "seer": {"engine": "remote", "plugins": ["divided_rollout", "context_sched"]},
                "plugin": {"divided_rollout": {"chunk_tokens": 16}},
                "engine": {"remote": {"urls": [each.url for each in fakes], "poll_s": 0.05}},
            },
            base_dir=tmp_path,
            origin="a test",
        )

        async def renew(runtime, observers):
            await runtime.renew_strategies(config, observers)

        runtime = partial(Runtime.from_config, config)
        app = make_app(runtime, trust=Trust(**trust, renew=renew), off=off)
        return serving.Served(app), fakes

    return make


def generate(served, **fields):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 64, "seed": 7, "n": 3}} | fields
    return httpx.post(f"{served.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)


def choices(answer):
    assert answer.status_code == 200, answer.text
    return [each["token_ids"] for each in answer.json()["choices"]]


def figure(served, name):
    lines = httpx.get(f"{served.url}/metrics").text.splitlines()
    return float(next(line.split()[-1] for line in lines if line.startswith(f"seer_{name} ")))


def test_a_scheduler_that_fails_in_mid_step_costs_no_response_and_begins_anew(front, fault):
    served, _ = front(most_fallbacks=100)
    with served:
        wanted = choices(generate(served))
        fault.kind, fault.after = "fails", 5
        marked = generate(served)
        assert choices(marked) == wanted
        written = int(marked.headers["X-Seer-Fallback"])
        assert 0 < written <= 3
        assert figure(served, "fallback_responses") == written
        assert httpx.get(f"{served.url}/health").status_code == 200
        fault.kind = ""
        # The next call begins with a scheduler anew, whether it is a request or, as here, the owner's.
        body = {"method": "reload_weights", "kwargs": {"weights_path": ""}}
        assert httpx.post(f"{served.url}/collective_rpc", json=body).status_code == 200
        again = generate(served)
        assert choices(again) == wanted
        assert again.json()["weight_version"] == 1
        assert "X-Seer-Fallback" not in again.headers


def test_a_stream_goes_on_where_the_scheduler_has_failed(front, fault):
    served, _ = front(most_fallbacks=100)
    with served:
        wanted = choices(generate(served))
        fault.kind, fault.after = "fails", 5
        lines = generate(served, stream=True).text.split("\n\n")
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for line in lines[:-2]:
        for each in httpx.Response(200, text=line.removeprefix("data: ")).json()["choices"]:
            found[each["index"]] += each["token_ids"]
    assert list(found.values()) == wanted


def test_no_more_responses_than_the_limit_are_written_without_it(front, fault):
    served, _ = front(most_fallbacks=2)
    with served:
        fault.kind = "fails"
        answer = generate(served)
        assert answer.status_code == 503
        assert "has failed" in answer.json()["error"]["message"]


def test_without_a_limit_a_failure_is_one(front, fault):
    served, _ = front()
    with served:
        fault.kind = "fails"
        assert generate(served).status_code == 503


def test_a_scheduler_that_sends_nothing_has_failed_after_a_while(front, fault):
    served, _ = front(most_fallbacks=100, stall_s=0.5)
    with served:
        wanted = choices(generate(served))
        fault.kind = "stalls"
        marked = generate(served)
        assert (choices(marked), marked.headers["X-Seer-Fallback"]) == (wanted, "3")
        fault.kind = ""
        assert "X-Seer-Fallback" not in generate(served).headers


def test_a_canary_counts_what_differs_and_stops_the_scheduler(front):
    served, fakes = front(most_fallbacks=100, canary=2, canary_stop=1)
    with served:
        generate(served)
        eventually(lambda: figure(served, "canary_compared") == 2)
        assert figure(served, "canary_different") == 0
        httpx.post(f"{served.url}/v1/sleep", json={})
        httpx.post(f"{served.url}/v1/wake", json={})
        generate(served)
        assert figure(served, "canary_compared") == 2  # of one version
    served, fakes = front(most_fallbacks=100, canary=2, canary_stop=1)
    with served:
        for each in fakes:
            each.noise = "free"
        assert "X-Seer-Fallback" not in generate(served).headers
        eventually(lambda: figure(served, "canary_different") > 0)
        assert generate(served).headers["X-Seer-Fallback"] == "3"


def test_a_scheduler_that_a_canary_has_stopped_is_not_used_again_once_the_limit_is_reached(front):
    served, fakes = front(most_fallbacks=3, canary=1, canary_stop=1)
    with served:
        for each in fakes:
            each.noise = "free"
        generate(served)
        eventually(lambda: figure(served, "canary_different") > 0)
        assert generate(served).headers["X-Seer-Fallback"] == "3"
        refused = generate(served)
        assert refused.status_code == 503
        assert "differ from those without it, 1 of 1" in refused.json()["error"]["message"]


def test_new_weights_wait_for_a_comparison_no_longer_than_for_responses(front, monkeypatch):
    monkeypatch.setattr(servers, "LEAVE_S", 0.0)
    served, fakes = front(canary=1)
    body = {"method": "reload_weights", "kwargs": {"weights_path": ""}}

    async def before(asked):
        if len(asked["token_ids"]) == len(PROMPT) and asked["sampling_params"]["max_tokens"] == 64:
            await asyncio.Event().wait()  # the comparison, which never ends

    with served:
        for each in fakes:
            each.before = before
        generate(served)
        assert httpx.post(f"{served.url}/collective_rpc", json=body, timeout=PATIENCE_S).status_code == 200
        assert figure(served, "canary_compared") == 0
        assert generate(served).json()["weight_version"] == 1


def test_weights_wait_for_responses_that_are_written_without_the_scheduler(front):
    served, fakes = front(most_fallbacks=100, canary=1, canary_stop=1)
    body = {"method": "reload_weights", "kwargs": {"weights_path": ""}}
    with served, ThreadPoolExecutor(1) as pool:
        for each in fakes:
            each.noise = "free"
        generate(served)
        eventually(lambda: figure(served, "canary_different") > 0)
        for each in fakes:
            each.noise, each.token_s = "keyed", 0.01
        waiting = pool.submit(generate, served)
        eventually(lambda: any(each.running for each in fakes))
        assert httpx.post(f"{served.url}/collective_rpc", json=body, timeout=PATIENCE_S).status_code == 200
        assert waiting.result().headers["X-Seer-Fallback"] == "3"
        assert waiting.result().json()["weight_version"] == 0
        assert generate(served).json()["weight_version"] == 1


def test_responses_that_are_written_without_the_scheduler_are_aborted_with_what_they_had(front, fault):
    served, fakes = front(most_fallbacks=100)
    with served, ThreadPoolExecutor(1) as pool:
        fault.kind, fault.after = "fails", 4
        for each in fakes:
            each.token_s = 0.01
        how = {"max_tokens": 400, "seed": 7, "n": 2}
        waiting = pool.submit(generate, served, request_id="mine", sampling_params=how)
        eventually(lambda: figure(served, "fallback_responses") == 2)
        body = {"request_ids": ["generate-tokens-mine"]}
        assert httpx.post(f"{served.url}/abort_requests", json=body).json()["aborted"] == 2
        found = waiting.result().json()["choices"]
        assert [each["finish_reason"] for each in found] == ["abort", "abort"]
        assert all(0 <= len(each["token_ids"]) < 400 for each in found)
        eventually(lambda: not any(each.running for each in fakes))


def test_an_abort_by_the_owner_cuts_no_response_that_is_written_without_the_scheduler(front, fault):
    served, fakes = front(most_fallbacks=100)
    with served, ThreadPoolExecutor(1) as pool:
        wanted = choices(generate(served))
        fault.kind = "fails"
        for each in fakes:
            each.token_s = 0.01
        waiting = pool.submit(generate, served)
        eventually(lambda: any(each.running for each in fakes))
        for each in fakes:
            each.aborted |= each.running
        assert choices(waiting.result()) == wanted
        assert waiting.result().headers["X-Seer-Fallback"] == "3"


def test_switched_off_requests_go_to_the_servers_in_turn_untouched(front):
    served, fakes = front(off=True)
    asked = []

    async def control(server, request):
        if request.path != "/anything":
            return None
        asked.append((server, request.query_string, await request.read()))
        return web.Response(body=b"\x00raw", content_type="text/odd", status=201)

    for each in fakes:
        each.control = partial(control, each)
    with served:
        for _ in range(2):
            answer = httpx.post(f"{served.url}/anything?a=b", content=b'{"unread": 1}')
            assert (answer.status_code, answer.content) == (201, b"\x00raw")
            assert answer.headers["content-type"] == "text/odd"
        assert [server for server, *_ in asked] == fakes
        assert {each[1:] for each in asked} == {("a=b", b'{"unread": 1}')}
        assert httpx.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "tiny"
        fakes[0].kill()
        assert all(httpx.get(f"{served.url}/version").status_code == 200 for _ in range(2))


def test_switched_off_a_request_to_abort_reaches_the_server_that_has_what_it_names(front):
    served, fakes = front(off=True)
    with served, ThreadPoolExecutor(2) as pool:
        for each in fakes:
            each.token_s = 0.01
        bodies = [{"token_ids": PROMPT, "request_id": name, **LONG} for name in ("one", "two")]
        path = f"{served.url}/inference/v1/generate"
        asked = []
        for body in bodies:
            asked.append(pool.submit(httpx.post, path, json=body, timeout=PATIENCE_S))
            eventually(lambda: all(each.running for each in fakes[: len(asked)]))
        for name in ("two", "one"):  # by turns each would reach the other server
            body = {"request_ids": [f"generate-tokens-{name}"]}
            assert httpx.post(f"{served.url}/inference/v1/abort_requests", json=body).status_code == 200
        for each in asked:
            assert each.result().json()["choices"][0]["finish_reason"] == "abort"
        fakes[0].kill()
        body = {"request_ids": []}
        assert httpx.post(f"{served.url}/inference/v1/abort_requests", json=body).status_code == 200
        fakes[1].kill()
        assert httpx.post(f"{served.url}/inference/v1/abort_requests", json=body).status_code == 503


def test_there_must_be_servers_to_pass_requests_on_to(serving, tmp_path):
    config = make_config(serving.TABLES, base_dir=tmp_path, origin="a test")
    with pytest.raises(ConfigError, match="SEER=off"):
        make_app(partial(Runtime.from_config, config), off=True)
