"""SGLang's ``/generate``, by its own names."""

import json

import httpx
import pytest
from seer_server.http import by_names
from seer_worker.tokenizer import ModelTokenizer

from seer_core.errors import PromptError
from seer_core.model.arrays import Logprobs, Tokens
from seer_core.ports.engine import ChunkPiece, ModelInfo

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


def test_requests_that_repeat_an_id_without_a_seed_are_drawn_anew(serve_sim):
    def tokens(path, **body):
        answer = httpx.post(f"{served.url}{path}", json=body, timeout=PATIENCE_S)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        return tuple(found["output_ids"] if "output_ids" in found else found["choices"][0]["token_ids"])

    with serve_sim() as served:
        how = {"max_new_tokens": 24}
        for agent in ({}, {"trajectory": "agent"}):
            own = {"rid": "mine", **agent}
            again = [tokens("/generate", input_ids=[5], sampling_params=how, **own) for _ in range(3)]
            assert len(set(again)) == 3
            own = {"request_id": "mine", **agent}
            form = {"token_ids": [5], "sampling_params": {"max_tokens": 24}}
            again = [tokens("/inference/v1/generate", **form, **own) for _ in range(3)]
            assert len(set(again)) == 3


def test_what_an_error_quotes_stays_as_the_client_wrote_it():
    error = PromptError("prompt 1: seed is 'seed', and the plug-ins' seed isn't \"a seed\"")
    renamed = by_names(error, {"seed": "sampling_seed"})
    assert str(renamed) == (
        "prompt 1: sampling_seed is 'seed', and the plug-ins' sampling_seed isn't \"a seed\""
    )
    assert renamed.field == "sampling_seed"


END = 257
"""The model's own end token."""


@pytest.fixture
def serve_words(serve_by_hand, playing, byte_model, output_of):
    """Return a function that serves a text, of which all but the last token are streamed first."""
    tokenizer = ModelTokenizer(byte_model)

    class Author(playing.Hand):
        def submit(self, job):
            tokens = Tokens(self.tokens)
            if job.streams:
                piece = ChunkPiece(job.id, 0, tokens[:-1], Logprobs([-0.5] * (len(tokens) - 1)), None)
                self.sink.chunk_streamed(self.id, piece)
            self.sink.chunk_finished(self.id, output_of(job, tokens, True))

    def make(text, *more):
        engine = Author(kv_capacity_tokens=1 << 16)
        engine.tokens = [*tokenizer.encode_part(text), *more]
        model = ModelInfo(262, 1 << 16, controls=("stop", "stop_token_ids", "include_stop_str_in_output"))
        return serve_by_hand(engine, tokenizer, model)

    return make


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("written", "how", "wanted"),
    [
        (("a<|im_start|>b", END), {}, "ab"),
        (("a<|im_start|>b", END), {"skip_special_tokens": False}, "a<|im_start|>b"),
        (("ab", END), {"no_stop_trim": True}, "ab"),
        (("ab", END), {"no_stop_trim": True, "skip_special_tokens": False}, "ab<|im_end|>"),
        (("one two.",), {"stop": "."}, "one two"),
        (("one two.",), {"stop": ".", "no_stop_trim": True}, "one two."),
    ],
)
def test_the_text_has_its_end_and_special_tokens_where_they_are_wanted(
    serve_words, written, how, wanted, stream
):
    with serve_words(*written) as served:
        how = {"max_new_tokens": 200, **how}
        answer = generate(served, text=None, input_ids=[1], sampling_params=how, stream=stream)
    assert answer.status_code == 200, answer.text
    text = answer.text if not stream else answer.text.split("\n\n")[-3].removeprefix("data: ")
    assert json.loads(text)["text"] == wanted
