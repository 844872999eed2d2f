"""Fields that Seer does not have are taken where they change nothing, and refused where they would."""

from functools import partial

import httpx
import pytest
from seer_server import make_app
from seer_server.neutral import IGNORED, IN_CHATS, IN_COMPLETIONS, NEUTRAL

from seer_core.runtime.runtime import Runtime

PATIENCE_S = 60
PATHS = {
    "completions": ("completions", {"prompt": "how far"}, IN_COMPLETIONS),
    "chats": ("chat/completions", {"messages": [{"role": "user", "content": "how far"}]}, IN_CHATS),
}
CHANGED = {"echo": True, "tool_choice": "required"}
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
    "top_logprobs": 0,
    "prompt_logprobs": None,
}
"""Fields that simulated engines do not have, and values that change nothing."""


@pytest.fixture(scope="module")
def ask(served_class, config):
    """Return a function: what is answered to a body with these fields."""

    with served_class(make_app(partial(Runtime.from_config, config))) as served:

        def post(kind, **fields):
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
    ],
)
def test_an_error_names_the_field_at_fault(ask, fields, param):
    answer = ask("completions", **fields)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param
