"""Chats through OpenAI's client: by the model's own template, and the library's tokens."""

import base64
import io
import json
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest
from PIL import Image
from seer_host.images import IMAGE_PART
from seer_worker.tokenizer import ModelTokenizer

from seer_core.ports.engine import ModelInfo
from tests.support.eventually import eventually

WEIGHTS = Path(__file__).parents[3] / "examples/tiny_reasoner/weights"
PATIENCE_S = 60
MESSAGES = [{"role": "system", "content": "be brief"}, {"role": "user", "content": "how far"}]


def test_its_tokens_are_the_library_s(serve_sim, expected):
    ours = expected({"messages": MESSAGES, "n": 3, "seed": 7, "group_id": "mine"})
    with serve_sim() as served:
        answer = served.client().chat.completions.create(
            model="seer",
            messages=MESSAGES,
            n=3,
            seed=7,
            logprobs=True,
            top_logprobs=0,
            extra_body={"return_token_ids": True, "group": "mine"},
        )
    assert answer.object == "chat.completion"
    prompt = bytes(token - 3 for token in answer.prompt_token_ids)
    assert prompt == b"system: be brief\nuser: how far\nassistant: "
    for index, found in enumerate(answer.choices):
        wanted = ours[f"mine/{index}"]
        assert (found.index, found.token_ids) == (index, list(wanted.token_ids))
        assert (found.message.role, found.message.content) == ("assistant", wanted.text)
        assert [each.logprob for each in found.logprobs.content] == pytest.approx(list(wanted.logprobs))
        first = found.logprobs.content[0]
        assert (bytes(first.bytes).decode(), first.top_logprobs) == (first.token, [])
        assert found.finish_reason == wanted.finish_reason
    written = sum(len(each.token_ids) for each in ours.values())
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (len(prompt), written)


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
def test_a_stream_brings_the_tokens_of_the_whole_and_then_their_numbers(serve_sim, path):
    more = {"extra_body": {"return_token_ids": True, "group": "g"}, "n": 2, "seed": 7, "model": "seer"}
    with serve_sim() as served:
        if path == "completions":
            create, asked = served.client().completions.create, {"prompt": "how far"}
        else:
            create, asked = served.client().chat.completions.create, {"messages": MESSAGES, "logprobs": True}
        whole = create(**asked, **more)
        *pieces, last = create(**asked, **more, stream=True, stream_options={"include_usage": True})
    assert (last.choices, last.usage) == ([], whole.usage)
    assert all(piece.usage is None for piece in pieces)
    for choice in whole.choices:
        mine = [piece.choices[0] for piece in pieces if piece.choices[0].index == choice.index]
        assert [token for each in mine for token in each.token_ids] == choice.token_ids
        assert [each.finish_reason for each in mine if each.finish_reason] == [choice.finish_reason]
        if path == "completions":
            assert [len(each.prompt_token_ids) for each in mine if hasattr(each, "prompt_token_ids")] == [7]
        else:
            scores = [score.logprob for each in mine for score in each.logprobs.content]
            assert scores == [each.logprob for each in choice.logprobs.content]
            assert [each.delta.role for each in mine][:2] in (["assistant"], ["assistant", None])
    if path != "completions":
        prompts = [piece.prompt_token_ids for piece in pieces if hasattr(piece, "prompt_token_ids")]
        assert prompts == [whole.prompt_token_ids]


def test_the_prompt_is_what_the_model_s_own_template_makes(serve_by_hand, playing):
    tokenizer, engine = ModelTokenizer(WEIGHTS), playing.Hand()
    parts = [{"type": "text", "text": text} for text in ("3", "4")]
    body = {"messages": [{"role": "user", "content": parts}], "max_tokens": 9, "max_completion_tokens": 4}
    with serve_by_hand(engine, tokenizer=tokenizer) as served, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(served.client().chat.completions.create, model="seer", **body)
        eventually(lambda: engine.jobs)
        [job] = engine.jobs.values()
        served.do(lambda: engine.finish(tokens=2))
        [choice] = answer.result(PATIENCE_S).choices
    assert job.token_ids == tokenizer.encode_chat([{"role": "user", "content": "3\n4"}])
    assert (job.max_tokens, choice.message.content) == (4, " " + tokenizer.decode([5, 6]))


def test_variables_for_the_template_reach_it(serve_by_hand, playing, tmp_path):
    shutil.copy(WEIGHTS / "tokenizer.json", tmp_path)
    (tmp_path / "chat_template.jinja").write_text(
        "{{ messages[0].content }}{{ 0 if enable_thinking else 4 }}"
    )
    tokenizer, engine = ModelTokenizer(tmp_path), playing.Hand()
    more = {"chat_template_kwargs": {"enable_thinking": False}, "top_k": -1, "min_p": 0}
    with serve_by_hand(engine, tokenizer=tokenizer) as served, ThreadPoolExecutor(1) as pool:
        create, messages = served.client().chat.completions.create, [{"role": "user", "content": "3"}]
        answer = pool.submit(create, model="seer", messages=messages, max_tokens=2, extra_body=more)
        eventually(lambda: engine.jobs or answer.done())
        [job] = engine.jobs.values()
        served.do(lambda: engine.finish(tokens=2))
        assert answer.result(PATIENCE_S).choices
        assert job.token_ids == tokenizer.encode_chat(messages, more["chat_template_kwargs"])
        assert job.token_ids != tokenizer.encode_chat(messages, {"enable_thinking": True})
        assert job.sampling.top_k == 0
        with pytest.raises(openai.BadRequestError, match="cannot set messages; leave them out"):
            create(model="seer", messages=messages, extra_body={"chat_template_kwargs": {"messages": []}})


class Seeing:
    """A tokenizer with one token for a text, and for an image as many as it is wide."""

    def encode(self, text):
        return [5]

    def encode_chat(self, messages, template_kwargs=None):
        return [7 if part is IMAGE_PART else 5 for each in messages for part in each["content"]]

    def place_images(self, token_ids, sizes):
        [(width, _)] = sizes
        at = token_ids.index(7)
        return [*token_ids[:at], *[7] * width, *token_ids[at + 1 :]], [(at, width)]

    def decode(self, token_ids):
        return "x" * len(token_ids)


def test_an_image_of_a_message_reaches_the_engine_and_no_file_of_the_server_does(
    serve_by_hand, playing, tmp_path
):
    engine, file = playing.Hand(), io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    (tmp_path / "a.png").write_bytes(file.getvalue())
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"

    def messages(url):
        parts = [{"type": "text", "text": "a"}, {"type": "image_url", "image_url": {"url": url}}]
        return [{"role": "user", "content": parts}]

    model = ModelInfo(1000, 512, takes_images=True)
    with serve_by_hand(engine, Seeing(), model) as served, ThreadPoolExecutor(1) as pool:
        create = served.client().chat.completions.create
        for path, fact in (
            (str(tmp_path / "a.png"), "names no directory for paths"),
            ("http://127.0.0.1/a.png", "Seer fetches none"),
        ):
            with pytest.raises(openai.BadRequestError, match=fact):
                create(model="seer", messages=messages(path), max_tokens=2)
        answer = pool.submit(create, model="seer", messages=messages(url), max_tokens=2)
        eventually(lambda: engine.jobs or answer.done())
        [job] = engine.jobs.values()
        served.do(lambda: engine.finish(tokens=2))
        assert answer.result(PATIENCE_S).usage.prompt_tokens == 4
    assert job.token_ids == [5, 7, 7, 7]
    [place] = job.attachments["images"]
    assert (place["offset"], place["length"]) == (1, 3)
    assert job.attachments.sources[place["digest"]].read() == file.getvalue()


class SlowlySeeing(Seeing):
    """Places images when it may."""

    def __init__(self):
        self.may, self.calls = threading.Event(), 0

    def place_images(self, token_ids, sizes):
        self.calls += 1
        assert self.may.wait(PATIENCE_S)
        return super().place_images(token_ids, sizes)


@pytest.mark.parametrize(
    ("early", "as_tokens"),
    [(True, False), (False, False), (False, True)],
    ids=["with the reservation", "with the rows", "beside the rows' tokens"],
)
def test_images_of_a_reserved_group_are_read_once_and_hold_no_other_request_up(
    serve_by_hand, playing, early, as_tokens
):
    engine, tokenizer, file = playing.Hand(), SlowlySeeing(), io.BytesIO()
    Image.new("RGB", (3, 2), "red").save(file, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(file.getvalue()).decode()}"
    prompt = {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]}
    if as_tokens:
        prompt = {"prompt_token_ids": [5, 7], "images": [url]}
    group = {"group_id": "a", "n": 2, "max_tokens": 2, **(prompt if early else {})}
    model = ModelInfo(1000, 512, takes_images=True)
    with serve_by_hand(engine, tokenizer, model) as served, ThreadPoolExecutor(3) as pool:
        reserved = threading.Event()

        def reserve():
            body = {"groups": [group], "prompt_wait_s": 0, "progress_s": 0.1}
            with httpx.stream(
                "POST", f"{served.url}/v1/reservations", json=body, timeout=PATIENCE_S
            ) as lines:
                found = lines.iter_lines()
                next(found)
                reserved.set()
                *_, last = found
            return json.loads(last)

        def ask(index):
            row = {"group_id": "a", "index": index, **({} if early else prompt)}
            return httpx.post(f"{served.url}/v1/rows", json=row, timeout=PATIENCE_S).text

        reserving = pool.submit(reserve)
        if not early:
            assert reserved.wait(PATIENCE_S)
            rows = [pool.submit(ask, index) for index in range(2)]
        eventually(lambda: tokenizer.calls)
        assert httpx.get(f"{served.url}/health", timeout=PATIENCE_S).status_code == 200
        tokenizer.may.set()
        if early:
            assert reserved.wait(PATIENCE_S)
            rows = [pool.submit(ask, index) for index in range(2)]
        eventually(lambda: len(engine.jobs) == 2)
        for _ in range(2):
            served.do(lambda: engine.finish(tokens=2))
        assert all('"finish_reason":"stop"' in row.result(PATIENCE_S) for row in rows)
        assert "done" in reserving.result(PATIENCE_S)
    assert tokenizer.calls == 1


def test_text_becomes_tokens_and_text_again(serve_by_hand, playing):
    tokenizer = ModelTokenizer(WEIGHTS)
    with serve_by_hand(playing.Hand(), tokenizer=tokenizer) as served:

        def post(path, **body):
            answer = httpx.post(f"{served.url}/{path}", json=body, timeout=PATIENCE_S)
            return answer.status_code, answer.json()

        status, found = post("tokenize", prompt="34", add_special_tokens=True)
        assert (status, found["tokens"]) == (200, tokenizer.encode("34"))
        assert (found["count"], found["max_model_len"]) == (3, 512)
        messages = [{"role": "user", "content": "3"}]
        chat = post("tokenize", model="seer", messages=messages)[1]["tokens"]
        assert chat == tokenizer.encode_chat(messages)
        for prompt, tokens in (([7, 8], [7, 8]), ("messages", tokenizer.encode("messages"))):
            assert post("tokenize", prompt=prompt)[1]["tokens"] == tokens
        for tokens in (found["tokens"], chat):  # with special tokens, as at vLLM's server
            text = tokenizer.decode_all(tokens)
            assert post("detokenize", tokens=tokens) == (200, {"prompt": text})
        for body in ({"prompt": ["3", "4"]}, {"prompt": "3" * 9000}, {"messages": []}, {}):
            assert post("tokenize", **body)[0] == 400
        for body in ({"tokens": [-1]}, {"tokens": [1 << 40]}, {"tokens": "a"}, {}):
            assert post("detokenize", **body)[0] == 400
        assert post("detokenize", tokens=[7], model="another")[0] == 404


def test_a_model_without_a_template_is_one_clear_refusal(serve_by_hand, playing, tmp_path):
    shutil.copy(WEIGHTS / "tokenizer.json", tmp_path)
    with serve_by_hand(playing.Hand(), tokenizer=ModelTokenizer(tmp_path)) as served:
        with pytest.raises(openai.BadRequestError, match="has no chat template; give prompts as text"):
            served.client().chat.completions.create(model="seer", messages=MESSAGES, max_tokens=4)
        assert httpx.get(f"{served.url}/health").status_code == 200


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ({}, "messages"),
        ({"messages": []}, "messages holds none"),
        ({"messages": "how far"}, "messages"),
        ({"messages": [{"content": "a"}]}, "message 0 has no role"),
        ({"messages": [{"role": "user"}]}, "message 0 has None for its content"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]},
            "takes no images",
        ),
        ({"messages": [{"role": "user", "content": [3]}]}, "text alone"),
        ({"prompt": "how far"}, "prompt"),
        ({"messages": MESSAGES, "logprobs": 1}, "logprobs"),
        ({"messages": MESSAGES, "logprobs": True, "top_logprobs": 2}, "top_logprobs is not supported"),
        ({"messages": MESSAGES, "top_logprobs": 2}, "top_logprobs is for log-probs; set logprobs as well"),
        ({"messages": MESSAGES, "tools": [{}]}, "at `$.tools"),
        (
            {"messages": MESSAGES, "response_format": {"type": "json_object"}},
            "response_format is not supported",
        ),
        ({"messages": MESSAGES, "stream_options": {"include_usage": True}}, "set stream as well"),
        ({"messages": MESSAGES, "max_completion_tokens": 10**6}, "exceed"),
        ({"messages": [{"role": "user", "content": "x" * 10**5}]}, "the model takes"),
    ],
)
def test_what_is_no_chat_is_a_400_that_says_why(serve_sim, asked, words):
    with serve_sim() as served:
        answer = httpx.post(f"{served.url}/v1/chat/completions", json=asked, timeout=PATIENCE_S)
    assert answer.status_code == 400
    assert words in answer.json()["error"]["message"]
