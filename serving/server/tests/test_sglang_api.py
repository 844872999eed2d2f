"""SGLang's ``/generate``, by its own names."""

import json

import httpx
import pytest
from seer_server.http import by_names

from seer_core.errors import PromptError

PATIENCE_S = 60


def generate(served, **fields):
    body = {"text": "how far", "sampling_params": {"max_new_tokens": 24, "sampling_seed": 3}, **fields}
    return httpx.post(f"{served.url}/generate", json=body, timeout=PATIENCE_S)


@pytest.mark.parametrize("more", [{}, {"return_logprob": True, "rid": "mine"}])
def test_a_stream_ends_with_the_whole_answer(serve_sim, more):
    with serve_sim() as served:
        whole = generate(served, **more)
        stream = generate(served, stream=True, **more)
    assert whole.status_code == 200, whole.text
    *events, end = [each.removeprefix("data: ") for each in stream.text.split("\n\n")[:-1]]
    last = json.loads(events[-1])
    assert end == "[DONE]"
    assert len(last["output_ids"]) == 24
    assert (last["text"], last["output_ids"]) == (whole.json()["text"], whole.json()["output_ids"])
    assert len(last["meta_info"].get("output_token_logprobs", last["output_ids"])) == 24


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"text": None}, "input_ids"),
        ({"rid": "a\0"}, "rid"),
        ({"group": "a\0"}, "group"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
        ({"sampling_params": {"sampling_seed": -1}}, "sampling_seed"),
        ({"sampling_params": {"max_new_tokens": 2, "min_new_tokens": 3}}, "min_new_tokens"),
        ({"sampling_params": {"regex": "a"}}, "regex"),
        ({"sampling_params": {"ebnf": "a"}}, "ebnf"),
        ({"sampling_params": {"json_schema": "{}", "ebnf": ""}}, "ebnf"),
    ],
)
def test_an_error_has_the_name_that_the_client_has_for_a_field(serve_sim, fields, param):
    with serve_sim() as served:
        answer = generate(served, **fields)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert param in error["message"]


def test_what_an_error_quotes_stays_as_the_client_wrote_it():
    error = PromptError("prompt 1: seed is 'seed', and the plug-ins' seed isn't \"a seed\"")
    renamed = by_names(error, {"seed": "sampling_seed"})
    assert str(renamed) == (
        "prompt 1: sampling_seed is 'seed', and the plug-ins' sampling_seed isn't \"a seed\""
    )
    assert renamed.field == "sampling_seed"
