"""Tokens in, tokens out, in the form of vLLM's server: the library's tokens."""

import json

import httpx
import pytest

PATIENCE_S = 60
PROMPT = [5, 6, 7]


def generate(served, **fields):
    body = {"token_ids": PROMPT, **fields}
    return httpx.post(f"{served.url}/inference/v1/generate", json=body, timeout=PATIENCE_S)


def events(answer):
    lines = [line.removeprefix("data: ") for line in answer.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


@pytest.fixture
def wanted(expected):
    return expected({"prompt_token_ids": PROMPT, "n": 2, "max_tokens": 24, "group_id": "g"})


@pytest.mark.parametrize("mode", ["tokens", "text"])
def test_its_tokens_are_the_library_s(serve_sim, wanted, mode):
    sampling = {"n": 2, "max_tokens": 24, "logprobs": 1}
    with serve_sim() as served:
        answer = generate(
            served,
            sampling_params=sampling,
            group="g",
            output_mode=mode,
            return_token_ids=True,
            request_id="mine",
            cache_salt="salt",
            features=None,
        )
    assert answer.status_code == 200, answer.text
    found = answer.json()
    assert found["prompt_token_ids"] == PROMPT
    assert (found["output_mode"], found["model"], found["weight_version"]) == (mode, "seer", 0)
    assert found["request_id"].startswith("generate-tokens-")
    for choice in found["choices"]:
        ours = wanted[f"g/{choice['index']}"]
        assert choice["token_ids"] == list(ours.token_ids)
        content = choice["logprobs"]["content"]
        assert [each["logprob"] for each in content] == pytest.approx(list(ours.logprobs))
        assert (choice["finish_reason"], choice["stop_reason"]) == (ours.finish_reason, None)
        if mode == "text":
            assert choice["text"] == ours.text
        else:
            assert [each["token_id"] for each in content] == list(ours.token_ids)
    assert len(found["choices"]) == 2
    assert found["usage"]["completion_tokens"] == sum(len(each.token_ids) for each in wanted.values())


def test_a_stream_has_the_same_tokens_and_in_the_end_their_numbers(serve_sim, wanted):
    options = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
    with serve_sim() as served:
        answer = generate(served, sampling_params={"n": 2, "max_tokens": 24}, group="g", **options)
    *pieces, last = events(answer)
    tokens = {0: [], 1: []}
    for piece in pieces:
        (choice,) = piece["choices"]
        tokens[choice["index"]] += choice["token_ids"]
        assert piece["usage"] is None
    assert tokens == {index: list(wanted[f"g/{index}"].token_ids) for index in range(2)}
    assert pieces[0]["prompt_token_ids"] == PROMPT
    assert (last["choices"], last["usage"]["prompt_tokens"]) == ([], 3)


def test_each_call_without_a_name_gets_other_tokens(serve_sim):
    with serve_sim() as served:
        answers = [generate(served, sampling_params={"max_tokens": 24}).json() for _ in range(2)]
        assert "prompt_token_ids" not in answers[0]
        whole = {"max_tokens": 24, "seed": 3, "ignore_eos": True}  # a simulated length depends on the name
        seeded = [generate(served, sampling_params=whole).json() for _ in range(2)]
    first, second = (each["choices"][0]["token_ids"] for each in answers)
    assert first != second
    assert seeded[0]["choices"] == seeded[1]["choices"]


def test_how_text_is_written_changes_nothing_where_there_is_none(serve_sim):
    with serve_sim() as served:
        answers = [
            generate(served, sampling_params={"max_tokens": 24, "seed": 3, "ignore_eos": True, **more}).json()
            for more in ({}, {"skip_special_tokens": False, "detokenize": False})
        ]
    assert answers[0]["choices"] == answers[1]["choices"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"token_ids": []}, "token_ids"),
        ({"token_ids": [-1]}, "token_ids"),
        ({"token_ids": "text"}, "token_ids"),
        ({"prompt": "text"}, "prompt"),
        ({"features": {"mm_hashes": {}}}, "features"),
        ({"sampling_params": {"n": 0}}, "sampling_params"),
        ({"sampling_params": {"stop": ["a"]}}, "stop"),
        ({"sampling_params": {"structured_outputs": {"regex": "a"}}}, "structured_outputs"),
        ({"sampling_params": {"prompt_logprobs": 1}}, "prompt_logprobs"),
        ({"sampling_params": {"logprobs": 5}}, "logprobs"),
        ({"sampling_params": {"logprobs": 21}}, "sampling_params"),
        ({"sampling_params": {"top_logprobs": 5}}, "top_logprobs"),
        ({"request_id": "a\0"}, "request_id"),
        ({"request_id": "a", "group": "g" * 201}, "group"),
        ({"output_mode": "images"}, "output_mode"),
        ({"output_mode": "text", "sampling_params": {"skip_special_tokens": False}}, "skip_special_tokens"),
        ({"model": "gpt"}, "model"),
        ({"stream_options": {"include_usage": True}}, None),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(serve_sim, fields, param):
    with serve_sim() as served:
        answer = generate(served, **fields)
    assert answer.status_code == (404 if param == "model" else 400)
    assert answer.json()["error"]["param"] == param


def test_the_server_has_a_version(serve_sim):
    with serve_sim() as served:
        assert httpx.get(f"{served.url}/version").json()["version"][0].isdigit()
