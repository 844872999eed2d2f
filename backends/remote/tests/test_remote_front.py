"""``seer serve`` in front of servers: control calls reach all of them, and no response is of two versions."""

from __future__ import annotations

import json
import threading
from functools import partial
from typing import Any

import httpx
import pytest
from aiohttp import web
from seer_host.config_files import make_config
from seer_remote.instance import RemoteInstance
from seer_server import make_app
from seer_server import servers as control_calls
from seer_session.runtime import Runtime

from seer_core.model.events import GroupsSubmitted
from seer_core.ports.policy import Observer
from tests.support.eventually import aeventually, eventually

PATIENCE_S = 60
PROMPT = [1, 2, 3, 4, 5]


class Owner:
    """The control calls of a stand-in, and what was called."""

    def __init__(self, server: Any) -> None:
        self.server = server
        self.calls: list[tuple[str, str, Any]] = []
        self.lacks: set[str] = set()
        self.fails: set[str] = set()
        self.workers = 1
        self.learns = True
        self.says: dict[str, Any] = {}
        server.control = self.answer

    async def answer(self, request: web.Request) -> web.Response | None:
        path = request.path
        if path not in control_calls.CONTROL_CALLS or path in ("/is_paused", "/is_sleeping", "/server_info"):
            return None
        if path in self.lacks:
            return web.json_response({"detail": "Not Found"}, status=404)
        if request.method == "OPTIONS":
            return web.json_response({"detail": "Method Not Allowed"}, status=405)
        body = await request.read()
        self.calls.append((path, request.query_string, json.loads(body) if body else None))
        if path in self.fails:
            return web.json_response({"error": "it cannot"}, status=500)
        if path == "/get_world_size":
            return web.json_response({"world_size": self.workers})
        if path == "/reset_prefix_cache":
            return web.json_response({"success": True})
        if path in ("/pause", "/sleep"):
            self.server.paused = True
        if path in ("/resume", "/wake_up"):
            self.server.paused = False
        if path == "/update_weights" and self.learns:
            self.server.weights += 1
        return web.json_response(self.says.get(path, {"message": path}))

    @property
    def paths(self) -> list[str]:
        return [path for path, _, _ in self.calls]


class Watch(Observer):
    """Keeps the specifications of groups."""

    def __init__(self) -> None:
        self.specs: list[Any] = []

    def observe(self, now: float, event: Any, commands: Any) -> None:
        if isinstance(event, GroupsSubmitted):
            self.specs += event.groups


@pytest.fixture
def front(fake, serving, tmp_path):
    """Return a function that makes a server in front of stand-ins, and the owners of these."""

    def make(count: int = 2, chunk_tokens: int = 16, **settings: Any):
        fakes = [fake() for _ in range(count)]
        config = make_config(
            {
                "seer": {"engine": "remote", "plugins": ["divided_rollout", "context_sched"]},
                "rollout": {"max_tokens": 32},
                "plugin": {"divided_rollout": {"chunk_tokens": chunk_tokens}},
                "engine": {"remote": {"urls": [each.url for each in fakes], "poll_s": 0.05}},
            },
            base_dir=tmp_path,
            origin="a test",
        )
        served = serving.Served(make_app(partial(Runtime.from_config, config), **settings))
        return served, [Owner(each) for each in fakes]

    return make


def generate(served, seed=7, most=32, headers=None, **fields):
    body = {"token_ids": PROMPT, "sampling_params": {"max_tokens": most, "seed": seed}} | fields
    url = f"{served.url}/inference/v1/generate"
    return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_S)


def call(served, path, body=None, method="POST", **more):
    return httpx.request(method, served.url + path, json=body, timeout=PATIENCE_S, **more)


def tokens(answer):
    assert answer.status_code == 200, answer.text
    return answer.json()["choices"][0]["token_ids"]


class Asking:
    """A request in a thread of its own."""

    def __init__(self, ask):
        self.answer = None
        self.thread = threading.Thread(target=self._run, args=(ask,))
        self.thread.start()

    def _run(self, ask):
        self.answer = ask()

    def result(self):
        self.thread.join(PATIENCE_S)
        assert self.answer is not None
        return self.answer


def slow_down(owners):
    """Let servers take their time from now on."""
    for each in owners:
        each.server.token_s = 0.01


def unfinished(served):
    return call(served, "/v1/state", method="GET").json()["unfinished"]


def test_the_address_serves_the_servers_model_by_its_name(front):
    served, _ = front()
    with served:
        [model] = call(served, "/v1/models", method="GET").json()["data"]
        assert model["id"] == "tiny"
        assert tokens(generate(served, model="tiny")) == tokens(generate(served))
        assert generate(served, model="another").status_code == 404


def test_a_call_reaches_every_server_and_the_answers_become_one(front):
    served, owners = front()
    owners[1].workers = 2
    with served:
        assert call(served, "/get_world_size", method="GET").json() == {"world_size": 3}
        assert call(served, "/reset_prefix_cache?reset_external=true").json() == {"success": True}
        info = {"master_address": "here", "rank_offset": 1, "world_size": 4}
        answer = call(served, "/init_weight_transfer_engine", {"init_info": info})
        assert answer.status_code == 200, answer.text
    assert [each.calls[-1][2]["init_info"]["rank_offset"] for each in owners] == [1, 2]
    for each in owners:
        assert ("/reset_prefix_cache", "reset_external=true", None) in each.calls


def test_skyrl_s_client_may_take_it_for_its_router_and_for_its_servers(front):
    """The forms of ``RemoteInferenceClient`` with one address as ``proxy_url`` and in ``server_urls``."""
    served, owners = front()
    sampling = {"max_tokens": 12, "temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "logprobs": 1}
    with served:
        asked = {"sampling_params": sampling | {"seed": 5}, "model": "tiny", "token_ids": PROMPT}
        answers = [
            call(served, "/inference/v1/generate", asked, headers={"X-Session-ID": name}) for name in "ab"
        ]
        assert tokens(answers[0]) == tokens(answers[1])
        [choice] = answers[0].json()["choices"]
        assert choice["finish_reason"] == "length"
        assert len([each["logprob"] for each in choice["logprobs"]["content"]]) == 12
        assert call(served, "/get_world_size", {}, method="GET").json() == {"world_size": 2}
        for path, body, query in (
            ("/pause", None, {"mode": "keep", "clear_cache": "false"}),
            ("/resume", None, {}),
            ("/sleep", {"level": 2}, {}),
            ("/wake_up", {"tags": ["weights"]}, {}),
            ("/update_weights", {"update_info": {"names": ["a"]}}, {}),
            ("/wake_up", {"tags": ["kv_cache"]}, {}),
            ("/reset_prefix_cache", {"reset_running_requests": False}, {}),
        ):
            answer = call(served, path, body, params=query)
            assert answer.status_code == 200, answer.text
        after = call(served, "/inference/v1/generate", asked)
        assert tokens(after) != tokens(answers[0])  # by the new weights
    for each in owners:
        assert each.paths.count("/wake_up") == 2
        assert ("/pause", "mode=keep&clear_cache=false", None) in each.calls


def test_servers_make_tokens_of_texts_and_images_in_turn(front):
    served, owners = front()
    path = "/v1/chat/completions/render"
    with served:
        for _ in range(2):
            assert call(served, path, {"messages": []}).json() == {"message": path}
    assert [each.calls for each in owners] == [[(path, "", {"messages": []})]] * 2


def test_nothing_is_passed_on_where_one_server_lacks_the_call(front):
    served, owners = front()
    owners[1].lacks.add("/pause")
    with served:
        answer = call(served, "/pause")
        assert answer.status_code == 404
        assert owners[1].server.url in answer.json()["error"]["message"]
        assert not owners[0].calls
        tokens(generate(served))


def test_engines_of_seer_s_own_have_no_such_calls(serving, tmp_path):
    config = make_config(serving.TABLES, base_dir=tmp_path, origin="a test")
    with serving.Served(make_app(partial(Runtime.from_config, config))) as served:
        assert call(served, "/pause").status_code == 404


def test_a_server_that_does_not_answer_is_left_out(front):
    served, owners = front()
    with served:
        owners[1].server.kill()
        assert call(served, "/reset_prefix_cache").json() == {"success": True}
        assert owners[0].paths == ["/reset_prefix_cache"]
        owners[0].server.kill()
        assert call(served, "/reset_prefix_cache").status_code == 503


def test_a_pause_ends_responses_with_what_they_have_and_others_wait_for_its_end(front):
    served, owners = front(chunk_tokens=200)
    with served:
        slow_down(owners)
        whole = Asking(lambda: generate(served, most=400))
        eventually(lambda: any(each.server.running for each in owners))
        assert call(served, "/pause").json() == {"message": "/pause"}
        [choice] = whole.result().json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert 0 < len(choice["token_ids"]) < 400
        later = Asking(lambda: generate(served))
        assert call(served, "/get_world_size", method="GET").status_code == 200
        assert later.answer is None
        call(served, "/resume")
        assert len(tokens(later.result())) == 32
    assert [each.paths for each in owners] == [["/pause", "/get_world_size", "/resume"]] * 2


def test_a_pause_that_keeps_responses_costs_none_and_weights_may_not_change_meanwhile(front):
    served, owners = front(chunk_tokens=200)
    with served:
        wanted = tokens(generate(served, most=64))
        slow_down(owners)
        kept = Asking(lambda: generate(served, most=64))
        eventually(lambda: any(each.server.running for each in owners))
        call(served, "/pause?mode=keep")
        refused = call(served, "/start_weight_update", {})
        assert refused.status_code == 409
        assert "two versions" in refused.json()["error"]["message"]
        assert kept.answer is None
        call(served, "/resume")
        assert tokens(kept.result()) == wanted
    assert all("/start_weight_update" not in each.paths for each in owners)


@pytest.mark.parametrize(
    ("path", "more"), [("/v1/load_lora_adapter", {"load_inplace": True}), ("/skyrl/v1/load_lora_adapter", {})]
)
def test_an_adapter_in_place_of_another_waits_for_responses_and_a_new_one_does_not(front, path, more):
    served, owners = front(chunk_tokens=200)
    new, again = ({"lora_name": name, "lora_path": "/there"} | more for name in ("new", "again"))
    with served:
        for each in owners:
            each.server.adapters = ["again"]
        slow_down(owners)
        kept = Asking(lambda: generate(served, most=64))
        eventually(lambda: any(each.server.running for each in owners))
        call(served, "/pause?mode=keep")
        assert call(served, path, new).status_code == 200
        refused = call(served, path, again)
        assert refused.status_code == 409
        assert "two versions" in refused.json()["error"]["message"]
        call(served, "/resume")
        assert kept.result().json()["weight_version"] == 0
        assert call(served, path, again).status_code == 200
        assert generate(served).json()["weight_version"] == 1
    for each in owners:
        assert [body["lora_name"] for called, _, body in each.calls if called == path] == ["new", "again"]


@pytest.mark.parametrize(("kind", "field"), [("vllm", "model"), ("sglang", "lora_path")])
def test_the_name_of_an_adapter_goes_to_servers_as_they_take_it(front, monkeypatch, kind, field):
    served, owners = front()
    monkeypatch.setattr(RemoteInstance, "kind", kind)
    with served:
        for each in owners:
            each.server.adapters = ["tuned"]
        body = {"model": "tuned", "prompt": PROMPT, "max_tokens": 4}
        assert call(served, "/v1/completions", body).status_code == 200
        sent = [request for each in owners for request in each.server.requests]
        assert [name for request in sent for name, value in request.items() if value == "tuned"] == [field]
        assert call(served, "/v1/completions", body | {"model": "another"}).status_code == 404


def test_weights_do_not_change_on_paused_servers_whose_kept_responses_were_given_up(front):
    served, owners = front(chunk_tokens=200)
    with served:
        slow_down(owners)
        kept = Asking(lambda: generate(served, most=64, request_id="kept"))
        eventually(lambda: any(each.server.running for each in owners))
        call(served, "/pause?mode=keep")
        call(served, "/abort_requests", {"request_ids": ["generate-tokens-kept"]})
        kept.result()
        eventually(lambda: call(served, "/v1/state", method="GET").json()["instances"] == [])
        refused = call(served, "/update_weights", {})
        assert refused.status_code == 409
        assert "resume, and pause" in refused.json()["error"]["message"]
        call(served, "/resume")
        assert tokens(generate(served))
        assert call(served, "/update_weights", {}).status_code == 200


def test_weights_change_between_responses_and_the_servers_are_looked_at(front):
    served, owners = front()
    with served:
        before = generate(served)
        call(served, "/start_weight_update", {})
        waiting = Asking(lambda: generate(served))
        call(served, "/update_weights", {"update_info": {"names": ["a"]}})
        call(served, "/update_weights", {"update_info": {"names": ["b"]}})
        assert waiting.answer is None
        call(served, "/finish_weight_update", {})
        after = waiting.result()
    assert tokens(before) != tokens(after)
    assert (before.json()["weight_version"], after.json()["weight_version"]) == (0, 1)
    assert len({each.server.weights for each in owners}) == 1


def test_a_server_that_was_left_with_old_weights_writes_nothing_more(front):
    served, owners = front()
    owners[1].learns = False
    with served:
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert call(served, path, {}).status_code == 200
        alive = call(served, "/v1/state", method="GET").json()["instances"]
        assert len(alive) == 1
        tokens(generate(served))


def test_a_call_that_fails_is_answered_with_the_server_s_error(front):
    served, owners = front()
    owners[1].fails.add("/pause")
    with served:
        answer = call(served, "/pause")
        assert (answer.status_code, answer.json()) == (500, {"error": "it cannot"})
        assert answer.headers["X-Seer-Server"] == owners[1].server.url
        call(served, "/resume")
        eventually(lambda: tokens(generate(served)))


def test_a_client_that_leaves_while_it_waits_leaves_nothing_behind(front):
    served, _ = front()
    with served:
        call(served, "/sleep?level=1")
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{served.url}/inference/v1/generate",
                json={"token_ids": PROMPT},
                timeout=httpx.Timeout(PATIENCE_S, read=0.2),
            )
        call(served, "/wake_up")
        eventually(lambda: unfinished(served) == 0)
        tokens(generate(served))


def test_parts_of_a_server_s_memory_wake_one_after_the_other(front):
    served, _ = front()
    with served:
        call(served, "/sleep?level=2")
        call(served, "/wake_up?tags=weights")
        waiting = Asking(lambda: generate(served))
        call(served, "/update_weights", {"update_info": {}})
        assert waiting.answer is None
        call(served, "/wake_up?tags=kv_cache")
        assert waiting.result().json()["weight_version"] == 1


def test_servers_that_say_that_they_are_awake_are_no_longer_paused_either(front):
    served, owners = front()
    with served:
        for path in ("/pause", "/sleep?level=2"):
            call(served, path)
        waiting = Asking(lambda: generate(served))
        for place, (status, others) in {
            "/wake_up?tags=weights": ("sleeping", "sleeping"),
            "/wake_up?tags=kv_cache": ("awake", "sleeping"),
            "/wake_up": ("awake", "awake"),
        }.items():
            assert waiting.answer is None
            for each, said in zip(owners, (status, others), strict=True):
                each.says["/wake_up"] = {"status": said}
            call(served, place)
        assert len(tokens(waiting.result())) == 32


def test_a_body_that_is_too_large_goes_nowhere(front, monkeypatch):
    monkeypatch.setattr(control_calls, "LARGEST_CALL", 1000)
    served, owners = front()
    with served:
        assert call(served, "/update_weights", {"update_info": "a" * 1000}).status_code == 413
        assert not owners[0].calls


def test_clients_that_have_no_place_for_a_token_bring_it_in_the_address(front):
    served, _ = front(token="a-secret-of-this-test")
    with served:
        place = served.url.replace("http://", "http://seer:a-secret-of-this-test@")
        assert httpx.get(f"{place}/get_world_size").json() == {"world_size": 2}
        assert httpx.get(f"{place}/get_world_size", headers={"Origin": "http://else"}).status_code == 401
        assert httpx.get(served.url.replace("//", "//seer:wrong@") + "/get_world_size").status_code == 401
        assert httpx.get(f"{served.url}/get_world_size").status_code == 401


def test_requests_of_one_prompt_or_one_family_are_siblings(front):
    watch = Watch()
    served, _ = front(observers=[watch])
    with served:
        for _ in range(2):
            generate(served)
        generate(served, token_ids=[9])
        generate(served, headers={"X-Seer-Family": "mine"})
        generate(served, family="mine", token_ids=[8])
    first, second, third, fourth, fifth = [each.family for each in watch.specs]
    assert first == second != third
    assert fourth == fifth == "mine"


def test_a_request_ends_by_its_own_id_with_what_it_has(front):
    served, owners = front()
    with served:
        slow_down(owners)
        long = Asking(lambda: generate(served, most=400, request_id="mine"))
        eventually(lambda: sum(len(each.server.requests) for each in owners) > 2)
        eventually(lambda: any(each.server.running for each in owners))
        ids = {"request_ids": ["generate-tokens-mine", "generate-tokens-another"]}
        assert call(served, "/inference/v1/abort_requests", ids).json()["aborted"] == 1
        found = long.result().json()
        assert found["request_id"] == "generate-tokens-mine"
        assert found["choices"][0]["finish_reason"] == "abort"


ABORTS = {
    "vllm": ("/inference/v1/generate", {"request_id": "mine"}, "generate-tokens-mine"),
    "sglang": ("/generate", {"rid": "mine"}, "mine"),
    "completion": ("/v1/completions", {"request_id": "mine"}, "cmpl-mine"),
    "prompt": ("/v1/completions", {"request_id": "mine"}, "cmpl-mine-0"),
    "chat": ("/v1/chat/completions", {"rid": "mine"}, "mine"),
    "all": ("/v1/completions", {}, ""),
}
BODIES = {
    "/inference/v1/generate": {"token_ids": PROMPT},
    "/generate": {"input_ids": PROMPT},
    "/v1/completions": {"prompt": PROMPT, "max_tokens": 400},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "a"}], "max_tokens": 400},
}


class Numbered:
    """A tokenizer of characters, with a template for chats."""

    def encode(self, text):
        return [ord(each) % 96 for each in text]

    def decode(self, tokens):
        return " ".join(map(str, tokens))

    def encode_chat(self, messages, variables=None):
        return self.encode("".join(each["content"] for each in messages))


def arrivals(served):
    """Return the requests that are not submitted yet."""
    return list(served.server.config.app.state.broker._arrivals)


def abort(served, form, name):
    """Abort a request by its id, or all; return how many responses were aborted."""
    if form == "sglang":
        assert call(served, "/abort_request", {"rid": name}).status_code == 200
        return 1
    return call(served, "/abort_requests", {"request_ids": [name] if name else []}).json()["aborted"]


def reasons(answer):
    """Return why responses of any form ended."""
    assert answer.status_code == 200, answer.text
    found = answer.json()
    if "meta_info" in found:
        return [found["meta_info"]["finish_reason"]["type"]]
    return [each["finish_reason"].removesuffix("ed") for each in found["choices"]]


@pytest.mark.parametrize("form", ABORTS)
def test_a_request_is_aborted_while_it_waits_for_servers_and_never_starts(front, monkeypatch, form):
    monkeypatch.setattr(Runtime, "tokenizer", Numbered())
    path, more, name = ABORTS[form]
    served, owners = front()
    with served:
        call(served, "/sleep?level=1")
        sent = [len(each.server.requests) for each in owners]
        waiting = Asking(lambda: call(served, path, BODIES[path] | more))
        eventually(lambda: arrivals(served))
        assert abort(served, form, name) == 1
        assert reasons(waiting.result()) == ["abort"]
        assert abort(served, form, name) == (form == "sglang")
        assert [len(each.server.requests) for each in owners] == sent
        call(served, "/wake_up")
        assert len(tokens(generate(served))) == 32


@pytest.mark.parametrize("form", ["completion", "prompt", "chat"])
def test_a_request_of_openai_s_form_is_aborted_by_its_own_id(front, monkeypatch, form):
    monkeypatch.setattr(Runtime, "tokenizer", Numbered())
    path, more, name = ABORTS[form]
    served, owners = front()
    with served:
        slow_down(owners)
        long = Asking(lambda: call(served, path, BODIES[path] | more))
        eventually(lambda: any(each.server.running for each in owners))
        assert abort(served, form, name) == 1
        assert reasons(long.result()) == ["abort"]
        assert long.result().json()["id"] == name.removesuffix("-0")


def test_one_prompt_of_a_request_is_aborted_by_the_id_that_vllm_gives_it(front):
    served, _ = front()
    body = {"prompt": [PROMPT, [9]], "max_tokens": 32, "request_id": "mine"}
    with served:
        call(served, "/sleep?level=1")
        waiting = Asking(lambda: call(served, "/v1/completions", body))
        eventually(lambda: [each.prompts for each in arrivals(served)] == [2])
        assert abort(served, "prompt", "cmpl-mine-1") == 1
        call(served, "/wake_up")
        assert reasons(waiting.result()) == ["length", "abort"]


def test_a_pause_that_aborts_lets_requests_wait_that_have_not_begun(front):
    served, _ = front()
    with served:
        call(served, "/sleep?level=1")
        waiting = Asking(lambda: generate(served))
        eventually(lambda: arrivals(served))
        call(served, "/pause?mode=abort")
        for path in ("/wake_up", "/resume"):
            call(served, path)
        assert len(tokens(waiting.result())) == 32


def alone(owner, seed):
    """Return what a server by itself writes with a seed."""
    how = {"max_tokens": 32, "seed": seed, "temperature": 1.0, "top_k": 0, "logprobs": 0}
    body = {"token_ids": PROMPT, "sampling_params": how}
    answer = httpx.post(f"{owner.server.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)
    return tokens(answer)


def test_the_responses_to_a_prompt_have_the_seeds_that_a_server_alone_gives_them(front, monkeypatch):
    served, owners = front()
    in_vllm = {"token_ids": PROMPT, "sampling_params": {"max_tokens": 32, "seed": 7, "n": 3}}
    how = {"max_new_tokens": 32, "sampling_seed": 7, "n": 3}
    in_sglang = {"input_ids": PROMPT, "sampling_params": how}
    in_openai = {"prompt": [PROMPT, PROMPT], "max_tokens": 32, "seed": 7, "n": 3, "return_token_ids": True}

    def found(path, body):
        answer = call(served, path, body).json()
        return [each["token_ids"] for each in answer["choices"]]

    with served:
        counted = [alone(owners[0], seed) for seed in (7, 8, 9)]
        assert found("/inference/v1/generate", in_vllm) == counted
        assert [each["output_ids"] for each in call(served, "/generate", in_sglang).json()] == counted[:1] * 3
        assert found("/v1/completions", in_openai) == counted * 2
        in_vllm["sampling_params"]["seed"] = 2**63 - 1
        refused = call(served, "/inference/v1/generate", in_vllm)
        assert (refused.status_code, "seeds[1]: expected" in refused.text) == (400, True)
        monkeypatch.setattr(RemoteInstance, "kind", "sglang")
        assert found("/v1/completions", in_openai) == counted[:1] * 6
        del in_openai["seed"]
        assert len({tuple(each) for each in found("/v1/completions", in_openai)}) == 6


def test_sglang_s_form_has_the_same_tokens(front):
    served, _ = front()
    with served:
        wanted = tokens(generate(served, most=20))
        how = {"max_new_tokens": 20, "sampling_seed": 7, "top_k": -1}
        body = {"input_ids": PROMPT, "sampling_params": how, "return_logprob": True, "rid": "mine"}
        one = call(served, "/generate", body).json()
        meta = one["meta_info"]
        assert one["output_ids"] == wanted
        assert (meta["id"], meta["finish_reason"]) == ("mine", {"type": "length", "length": 20})
        assert [token for _, token, _ in meta["output_token_logprobs"]] == wanted
        many = call(served, "/generate", body | {"input_ids": [PROMPT, [4]]}).json()
        assert [len(each["output_ids"]) for each in many] == [20, 20]
        lines = call(served, "/generate", body | {"stream": True}).text.split("\n\n")
        pieces = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
        assert pieces[-1]["output_ids"] == wanted
        assert lines[-2] == "data: [DONE]"
        call(served, "/update_weights", {})
        lines = call(served, "/generate", body | {"stream": True}).text.split("\n\n")
        last = json.loads(lines[-3].removeprefix("data: "))
        assert last["meta_info"]["weight_version"] == "1"
        assert call(served, "/generate", {"sampling_params": how}).status_code == 400


def test_fields_that_seer_does_not_have_go_to_the_servers_and_come_back(front):
    served, owners = front()

    def answer(body):
        body["choices"][0]["routed_experts"] = "AAAA"
        return body

    with served:
        for each in owners:
            each.server.spoil = answer
        features = {"mm_hashes": {"image": ["a"]}}
        how = {"max_tokens": 32, "seed": 7, "thinking_token_budget": 5}
        found = generate(served, features=features, sampling_params=how)
        assert found.json()["choices"][0]["routed_experts"] == "AAAA"
        assert tokens(found) == tokens(generate(served))
    sent = [each for owner in owners for each in owner.server.requests if "features" in each]
    assert len(sent) == 1  # a budget for thinking holds within one request
    for each in sent:
        assert each["features"] == features
        assert each["sampling_params"]["thinking_token_budget"] == 5


def test_sglang_s_calls_have_the_effects_of_vllm_s(front):
    served, owners = front()
    with served:
        assert call(served, "/flush_cache").status_code == 200
        call(served, "/pause_generation", {"mode": "abort"})
        waiting = Asking(lambda: generate(served))
        call(served, "/continue_generation", {})
        before = tokens(waiting.result())
        call(served, "/release_memory_occupation", {"tags": ["kv_cache", "weights"]})
        call(served, "/resume_memory_occupation", {"tags": ["weights"]})
        waiting = Asking(lambda: generate(served))
        call(served, "/update_weights_from_disk", {"model_path": "there"})
        assert waiting.answer is None
        call(served, "/resume_memory_occupation", {"tags": ["kv_cache"]})
        after = waiting.result()
        assert (tokens(after), after.json()["weight_version"]) == (before, 1)
        refused = call(served, "/init_weights_update_group", {"rank_offset": 1, "world_size": 3})
        assert "does not say how many workers" in refused.json()["error"]["message"]
    assert owners[0].paths == owners[1].paths
    assert len(owners[0].paths) == 7


def test_a_pause_that_keeps_no_response_ends_with_its_resume_after_new_weights(front):
    served, _ = front()
    with served:
        before = tokens(generate(served))
        for path in ("/pause?mode=keep", "/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert call(served, path, {}).status_code == 200
        resumed = call(served, "/resume")
        assert resumed.status_code == 200, resumed.text
        after = generate(served)
        assert tokens(after) != before
        assert after.json()["weight_version"] == 1


def test_requests_wait_from_the_moment_at_which_a_pause_waits_for_responses(front):
    served, owners = front(chunk_tokens=200)
    with served:
        slow_down(owners)
        first = Asking(lambda: generate(served, most=200))
        eventually(lambda: any(each.server.running for each in owners))
        pause = Asking(lambda: call(served, "/pause?mode=wait"))
        eventually(lambda: call(served, "/v1/state", method="GET").json()["changing"])
        later = Asking(lambda: generate(served))
        assert len(tokens(first.result())) == 200
        assert pause.result().status_code == 200
        assert later.answer is None
        assert call(served, "/resume").status_code == 200
        assert len(tokens(later.result())) == 32


def test_requests_wait_until_all_servers_have_been_looked_at_for_their_new_weights(front):
    served, owners = front()
    with served:
        call(served, "/start_weight_update", {})
        call(served, "/update_weights", {})
        slow_down(owners)
        finish = Asking(lambda: call(served, "/finish_weight_update", {}))
        eventually(lambda: any(each.server.running for each in owners))  # Seer looks
        found = generate(served)
        assert len(tokens(found)) == 32
        assert found.json()["weight_version"] == 1
        assert finish.result().status_code == 200


def test_a_second_pause_that_aborts_ends_the_responses_that_the_first_has_kept(front):
    served, owners = front(chunk_tokens=200)
    with served:
        slow_down(owners)
        kept = Asking(lambda: generate(served, most=400))
        eventually(lambda: any(each.server.running for each in owners))
        call(served, "/pause?mode=keep")
        assert call(served, "/pause?mode=abort").status_code == 200
        [choice] = kept.result().json()["choices"]
        assert choice["finish_reason"] == "abort"
        assert call(served, "/start_weight_update", {}).status_code == 409
        assert call(served, "/resume").status_code == 200
        tokens(generate(served))


def test_a_sleep_of_the_scheduler_alone_ends_as_vllm_ends_it(front):
    served, _ = front()
    with served:
        for wake in ("/wake_up?tags=scheduling", "/wake_up"):
            assert call(served, "/sleep?level=0").status_code == 200
            assert call(served, wake).status_code == 200
            assert len(tokens(generate(served))) == 32


def test_a_wake_without_parts_wakes_every_part_that_sleeps(front):
    served, _ = front()
    with served:
        tags = ["kv_cache", "weights", "cuda_graph"]
        assert call(served, "/release_memory_occupation", {"tags": tags}).status_code == 200
        assert call(served, "/resume_memory_occupation", {}).status_code == 200
        assert len(tokens(generate(served))) == 32


def pause_directly(owners, *, paused=True):
    """Pause servers, as an owner does who calls them and not Seer; requests wait there until it is over."""

    async def before(body):
        await aeventually(lambda: not any(each.server.paused for each in owners))

    for each in owners:
        each.server.paused, each.server.before = paused, before


def instances(served):
    return call(served, "/v1/state", method="GET").json()["instances"]


def changed_directly(served, owners):
    """Resume servers directly, and return the version of the weights that then write."""
    pause_directly(owners, paused=False)
    eventually(lambda: len(instances(served)) == len(owners))
    return generate(served).json()["weight_version"]


def test_a_control_call_goes_on_while_servers_leave_and_return(front):
    served, owners = front()
    answered, waits = [], threading.Event()

    def held(owner):
        async def answer(request):
            if request.path == "/weight_info" and request.method == "GET":
                answered.append(owner)
                await aeventually(waits.is_set)
            return await owner.answer(request)

        return answer

    with served:
        for each in owners:
            each.server.control = held(each)
        asked = Asking(lambda: call(served, "/weight_info", method="GET"))
        eventually(lambda: len(answered) == 2)
        pause_directly(owners)
        eventually(lambda: not instances(served))
        assert changed_directly(served, owners) == 0
        waits.set()
        assert asked.result().status_code == 200


@pytest.mark.parametrize("seen", [True, False], ids=["seen", "not yet seen"])
def test_weights_change_through_seer_while_their_owner_has_paused_the_servers_directly(front, seen):
    served, owners = front()
    with served:
        before = tokens(generate(served))
        pause_directly(owners)
        if seen:
            eventually(lambda: not instances(served))
        for path in ("/start_weight_update", "/update_weights", "/finish_weight_update"):
            assert call(served, path, {}).status_code == 200
        assert changed_directly(served, owners) == 1
        assert tokens(generate(served)) != before


def test_servers_that_their_owner_has_paused_directly_can_be_paused_and_resumed_through_seer(front):
    served, owners = front()
    with served:
        pause_directly(owners)
        eventually(lambda: not instances(served))
        for path in ("/pause", "/update_weights", "/resume"):
            assert call(served, path, {}).status_code == 200
        assert changed_directly(served, owners) == 1


def test_weights_that_paused_servers_cannot_load_are_refused_with_the_reason(front, tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    body = {"directory": str(tmp_path), "wait_s": 0}
    served, owners = front()

    def refused(*statuses):
        answer = call(served, "/v1/weights", body)
        assert answer.status_code in statuses
        assert "is paused by its owner" in answer.json()["error"]["message"]

    with served:
        pause_directly(owners)
        refused(400, 503)
        eventually(lambda: not instances(served))
        refused(503)
        assert call(served, "/v1/sleep", {}).status_code == 200
        assert call(served, "/v1/wake", {}).status_code == 200
        assert changed_directly(served, owners) == 0
        assert call(served, "/v1/weights", body).json() == {"weight_version": 1}
