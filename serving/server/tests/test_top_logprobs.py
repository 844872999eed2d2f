"""Log-probs of the most probable tokens, in the forms of OpenAI and vLLM, whole and as streams."""

import json
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from seer_server.protocol import ChatRequest, CompletionRequest, records
from seer_server.tokens_api import parse_tokens
from seer_server.unsupported_fields import FieldError

from tests.support.eventually import eventually

PATIENCE_S = 60
PROMPT = [5, 6]


class Letters:
    """A tokenizer of one letter for each token, of which 8 and 9 have the same one."""

    def encode(self, text):
        return [ord(letter) - ord("a") for letter in text]

    def encode_chat(self, messages, template_kwargs=None):
        return PROMPT

    def decode(self, token_ids):
        return "".join(chr(ord("a") + min(token, 8)) for token in token_ids)


@pytest.fixture
def answer(serve_by_hand, playing):
    """Return a function: an answer of three tokens, or the events of its stream.

    In each place its token and those of the next higher ids are the most probable ones, at -0.5, -1.5 and so
    on.  Those of prompts are tokens 1, 2 and so on, at -0.25, -1.25 and so on; the second token has -2, the
    third -3.
    """

    def post(path, tokenizer=None, **body):
        engine = playing.Hand()
        with serve_by_hand(engine, tokenizer=tokenizer or Letters()) as served, ThreadPoolExecutor(1) as pool:
            url = f"{served.url}/{path}"
            waiting = pool.submit(httpx.post, url, json=body, timeout=PATIENCE_S)
            eventually(lambda: engine.jobs or waiting.done())
            for job in list(engine.jobs.values()):
                if body.get("stream"):
                    served.do(lambda job=job: engine.grow(tokens=min(2, job.max_tokens)))
                served.do(lambda job=job: engine.finish(tokens=min(3, job.max_tokens)))
            answer = waiting.result(PATIENCE_S)
        assert answer.status_code == 200, answer.text
        if not body.get("stream"):
            return answer.json()
        lines = [line.removeprefix("data: ") for line in answer.text.split("\n") if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    return post


@pytest.fixture
def ask(answer):
    """Return a function: the choices of an answer, or of a stream's pieces."""

    def post(path, **body):
        found = answer(path, **body)
        return [event["choices"][0] for event in found] if body.get("stream") else found["choices"]

    return post


@pytest.fixture
def ask_responses(answer):
    """Return a function: one of OpenAI's Responses, or the events of its stream."""
    return partial(answer, "v1/responses")


def test_completions_have_them_by_their_words_and_the_sampled_one_with_them(ask):
    [choice] = ask("v1/completions", prompt=PROMPT, logprobs=2)
    assert choice["logprobs"] == {
        "tokens": ["f", "g", "h"],
        "token_logprobs": [-0.5] * 3,
        "top_logprobs": [{"f": -0.5, "g": -1.5}, {"g": -0.5, "h": -1.5}, {"h": -0.5, "i": -1.5}],
        "text_offset": [0, 1, 2],
    }
    [choice] = ask("v1/completions", prompt=PROMPT, logprobs=4)
    assert choice["logprobs"]["top_logprobs"][2] == {"h": -0.5, "i": -1.5}  # two more have its word
    [choice] = ask("v1/completions", prompt=PROMPT, logprobs=0)
    own = zip(choice["logprobs"]["tokens"], choice["logprobs"]["token_logprobs"], strict=True)
    assert choice["logprobs"]["top_logprobs"] == [{word: score} for word, score in own]
    [choice] = ask("v1/completions", prompt=PROMPT)
    assert choice["logprobs"] is None


def test_a_stream_has_those_of_its_pieces(ask):
    for path, asked in (
        ("v1/completions", {"prompt": PROMPT, "logprobs": 3}),
        ("v1/chat/completions", {"messages": [], "logprobs": True, "top_logprobs": 3}),
    ):
        asked = asked if "prompt" in asked else {**asked, "messages": [{"role": "user", "content": "a"}]}
        [whole] = ask(path, **asked)
        pieces = ask(path, **asked, stream=True)
        assert len(pieces) > 1
        name = "top_logprobs" if "prompt" in asked else "content"
        joined = [each for piece in pieces for each in piece["logprobs"][name]]
        assert joined == whole["logprobs"][name]
        assert len(joined) == 3


def test_a_stream_that_begins_behind_some_tokens_has_those_of_the_others(ask):
    asked = {"prompt": PROMPT, "logprobs": 2, "stream": True, "seed": 3}
    pieces = ask("v1/completions", **asked, stream_options={"skip_tokens": [1]})
    assert [each for piece in pieces for each in piece["logprobs"]["top_logprobs"]] == [
        {"g": -0.5, "h": -1.5},
        {"h": -0.5, "i": -1.5},
    ]


def test_chats_have_as_many_as_were_asked_for(ask):
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True}
    [choice] = ask("v1/chat/completions", **asked, top_logprobs=2)
    first = choice["logprobs"]["content"][0]
    assert first == {
        "token": "f",
        "logprob": -0.5,
        "bytes": [ord("f")],
        "top_logprobs": [
            {"token": "f", "logprob": -0.5, "bytes": [ord("f")]},
            {"token": "g", "logprob": -1.5, "bytes": [ord("g")]},
        ],
    }
    [choice] = ask("v1/chat/completions", **asked)
    assert [each["top_logprobs"] for each in choice["logprobs"]["content"]] == [[], [], []]


def test_tokens_have_them_by_their_ids_the_sampled_one_among_them(ask):
    def first(wanted):
        [choice] = ask("inference/v1/generate", token_ids=PROMPT, sampling_params={"logprobs": wanted})
        assert choice["logprobs"]["content"][0]["token"] == "token_id:5"
        return [
            (each["token_id"], each["logprob"]) for each in choice["logprobs"]["content"][0]["top_logprobs"]
        ]

    assert first(0) == first(1) == [(5, -0.5)]
    assert first(3) == [(5, -0.5), (6, -1.5), (7, -2.5)]


def test_an_engine_without_them_answers_1_with_the_sampled_tokens_alone_and_refuses_more():
    def wanted(request, controls):
        [record] = records(request, "g", controls)
        return record["top_logprobs"]

    def completion(**fields):
        return CompletionRequest(prompt=[5], **fields)

    assert wanted(completion(logprobs=1), ()) is None
    assert wanted(completion(logprobs=1), ("top_logprobs",)) == 1
    with pytest.raises(FieldError, match="log-probs of sampled tokens alone"):
        wanted(completion(logprobs=2), ())
    assert wanted(completion(), ("top_logprobs",)) is None
    assert wanted(completion(logprobs=0), ("top_logprobs",)) == 0
    assert wanted(ChatRequest(messages=[], logprobs=True, top_logprobs=4), ()) == 4
    tokens = parse_tokens(b'{"token_ids": [5], "sampling_params": {"logprobs": 1}}')
    assert wanted(tokens.completion(), ("top_logprobs",)) == 0


# Log-probs of prompts.


@pytest.mark.parametrize("prompt", [[7, 3, 4], "hde"])
def test_an_echo_has_the_prompt_before_the_response_and_no_log_prob_of_its_first_token(ask, prompt):
    [choice] = ask("v1/completions", prompt=prompt, echo=True, logprobs=1, max_tokens=8)
    assert choice["text"] == "hdefgh"
    assert choice["logprobs"] == {
        "tokens": ["h", "d", "e", "f", "g", "h"],
        "token_logprobs": [None, -2.0, -3.0, -0.5, -0.5, -0.5],
        "top_logprobs": [
            None,
            {"b": -0.25, "d": -2.0},
            {"b": -0.25, "e": -3.0},
            {"f": -0.5},
            {"g": -0.5},
            {"h": -0.5},
        ],
        "text_offset": [0, 1, 2, 3, 4, 5],
    }
    assert "prompt_logprobs" not in choice


def test_an_echo_without_a_response_is_the_prompt_alone(ask):
    asked = {"prompt": [[7, 3], [4]], "echo": True, "logprobs": 2, "max_tokens": 0}
    first, second = ask("v1/completions", **asked)
    assert (first["text"], first["logprobs"]["tokens"]) == ("hd", ["h", "d"])
    assert first["logprobs"]["token_logprobs"] == [None, -2.0]
    assert first["logprobs"]["top_logprobs"] == [None, {"b": -0.25, "c": -1.25, "d": -2.0}]
    assert (second["text"], second["logprobs"]["token_logprobs"]) == ("e", [None])
    [choice] = ask("v1/completions", prompt="hd", echo=True, max_tokens=0)
    assert (choice["text"], choice["logprobs"]) == ("hd", None)


def test_prompt_logprobs_are_in_the_form_of_vllm(ask):
    def scored(logprob, word):
        return {"logprob": logprob, "rank": None, "decoded_token": word}

    wanted = [None, {"3": scored(-2.0, "d"), "1": scored(-0.25, "b")}]
    [choice] = ask("v1/completions", prompt=[7, 3], prompt_logprobs=1)
    assert (choice["text"], choice["prompt_logprobs"]) == ("fgh", wanted)
    [choice] = ask("v1/completions", prompt=[7, 3], prompt_logprobs=0)
    assert choice["prompt_logprobs"] == [None, {"3": scored(-2.0, "d")}]


def test_a_stream_begins_with_the_prompt_and_its_log_probs(ask):
    for asked in ({"max_tokens": 8}, {"max_tokens": 0}):
        asked = {"prompt": [7, 3, 4], "echo": True, "logprobs": 1, **asked}
        [whole] = ask("v1/completions", **asked)
        pieces = ask("v1/completions", **asked, stream=True)
        assert pieces[0]["text"].startswith("hde")
        assert "".join(piece["text"] for piece in pieces) == whole["text"]
        for name, values in whole["logprobs"].items():
            assert [each for piece in pieces for each in piece["logprobs"][name]] == values
    [whole] = ask("v1/completions", prompt=[7, 3], prompt_logprobs=1)
    first, *others = ask("v1/completions", prompt=[7, 3], prompt_logprobs=1, stream=True)
    assert first["prompt_logprobs"] == whole["prompt_logprobs"]
    assert {piece["prompt_logprobs"] for piece in others} <= {None}


def test_responses_have_log_probs_where_include_asks_for_them(ask_responses):
    asked = {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
    whole = ask_responses(**asked)
    [message] = whole["output"]
    [text] = message["content"]
    pairs = [{"token": "f", "logprob": -0.5, "bytes": [102]}, {"token": "g", "logprob": -1.5, "bytes": [103]}]
    assert text["logprobs"][0] == {**pairs[0], "top_logprobs": pairs}
    assert (len(text["logprobs"]), whole["top_logprobs"]) == (3, 2)
    events = ask_responses(**asked, stream=True)
    deltas = [each["logprobs"] for each in events if each["type"] == "response.output_text.delta"]
    assert len(deltas) > 1
    assert [each for delta in deltas for each in delta] == text["logprobs"]
    [done] = [each for each in events if each["type"] == "response.output_text.done"]
    assert done["logprobs"] == text["logprobs"]
    assert events[-1]["response"]["output"][0]["content"] == message["content"]
    [message] = ask_responses(input="a")["output"]
    assert message["content"][0]["logprobs"] == []


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({"echo": True, "stream": True, "seed": 1, "stream_options": {"skip_tokens": [1]}}, "leave echo and"),
        ({"prompt_logprobs": 1}, "prompt_logprobs is not supported by this engine"),
        ({"echo": True, "logprobs": 1}, "prompt_logprobs is not supported by this engine"),
        ({"prompt_logprobs": 21}, "prompt_logprobs"),
        ({"max_tokens": 0}, "max_tokens"),
    ],
)
def test_what_cannot_be_had_of_a_prompt_is_refused(serve_sim, asked, words):
    with serve_sim() as served:
        answer = httpx.post(f"{served.url}/v1/completions", json={"prompt": "a", **asked}, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
