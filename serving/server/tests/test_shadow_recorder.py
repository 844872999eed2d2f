"""Requests that are passed on while Seer watches: their lines, and what is none."""

import asyncio
import json

import pytest
from seer_server.shadow_recorder import ShadowRecorder, lengths_of
from structlog.testing import capture_logs


def test_lengths_are_read_in_the_forms_of_vllm_sglang_and_openai():
    tokens = {"token_ids": [1, 2, 3]}
    vllm = {"choices": [{"token_ids": [4, 5]}, {"token_ids": [6]}]}
    [(name, *one), (same, *two)] = lengths_of(json.dumps(tokens).encode(), json.dumps(vllm).encode())
    assert name == same
    assert [one, two] == [[3, 2], [3, 1]]
    sglang = {"meta_info": {"prompt_tokens": 7, "completion_tokens": 9}}
    assert [each[1:] for each in lengths_of(b'{"text": "a"}', json.dumps([sglang] * 2).encode())] == [
        (7, 9)
    ] * 2
    usage = {"usage": {"prompt_tokens": 5, "completion_tokens": 8}, "choices": [{"text": "b"}, {"text": "c"}]}
    assert [each[1:] for each in lengths_of(b'{"prompt": "a"}', json.dumps(usage).encode())] == [(5, 4)] * 2


@pytest.mark.parametrize("answer", [b"data: {}", b"{}", b'{"error": {}}', b"[1]", b'"\xff"', b"[" * 100_000])
def test_what_is_no_answer_has_no_lengths(answer):
    assert lengths_of(b'{"prompt": "a"}', answer) == []


def test_answers_pass_untouched_and_steps_are_counted(tmp_path):
    recorder = ShadowRecorder(tmp_path / "watched.jsonl")
    answer = b'{"meta_info": {"prompt_tokens": 7, "completion_tokens": 9}}'

    async def pieces():
        yield answer[:20]
        yield answer[20:]

    async def play():
        found = []
        recorder.changed()  # nothing was asked yet
        for _ in range(2):
            found.append(b"".join([each async for each in recorder.pieces(b'{"text": "a"}', "s", pieces())]))
            recorder.changed()
        return found

    assert asyncio.run(play()) == [answer] * 2
    lines = [json.loads(each) for each in (tmp_path / "watched.jsonl").read_text().splitlines()]
    assert [each["step"] for each in lines] == [0, 1]
    assert {(each["server"], each["prompt_tokens"], each["tokens"]) for each in lines} == {("s", 7, 9)}
    assert all(each["ended_s"] >= each["began_s"] for each in lines)


def test_an_answer_passes_where_its_request_cannot_be_noted(tmp_path):
    answer = b'{"meta_info": {"prompt_tokens": 7, "completion_tokens": 9}}'

    async def pieces():
        yield answer

    async def play():
        recorder = ShadowRecorder(tmp_path)  # a folder
        return [each async for each in recorder.pieces(b'{"text": "a"}', "s", pieces())]

    with capture_logs() as logs:
        assert asyncio.run(play()) == [answer]
    assert [each["event"] for each in logs] == ["request_not_noted"]
