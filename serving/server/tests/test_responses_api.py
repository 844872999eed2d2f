"""OpenAI's Responses against the server: the chat's tokens, in whole answers and as events."""

import json

import httpx
import pytest
from openai.types.responses import Response

PATIENCE_S = 60
INPUT = [
    {"role": "user", "content": [{"type": "input_text", "text": "how far"}]},
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "far"}]},
    {"role": "user", "content": "how far exactly"},
]
MESSAGES = [
    {"role": "system", "content": "be quick"},
    {"role": "user", "content": "how far"},
    {"role": "assistant", "content": "far"},
    {"role": "user", "content": "how far exactly"},
]


def post(served, **fields):
    body = {"input": "how far", **fields}
    return httpx.post(f"{served.url}/v1/responses", json=body, timeout=PATIENCE_S)


@pytest.fixture
def ours(expected):
    found = expected({"messages": MESSAGES, "n": 1, "max_tokens": 24, "group_id": "g"})
    return found["g/0"]


def fields(**more):
    return {
        "model": "seer",
        "input": INPUT,
        "instructions": "be quick",
        "max_output_tokens": 24,
        "extra_body": {"group": "g"},
        **more,
    }


def test_a_response_is_the_chat_s_text(serve_sim, ours):
    with serve_sim() as served:
        answer = served.client().responses.create(**fields())
    Response.model_validate(answer.to_dict())
    assert answer.output_text == ours.text
    assert (answer.usage.output_tokens, answer.object) == (len(ours.token_ids), "response")
    assert answer.usage.total_tokens == answer.usage.input_tokens + answer.usage.output_tokens
    assert answer.status == ("completed" if ours.finish_reason == "stop" else "incomplete")
    if ours.finish_reason == "length":
        assert answer.incomplete_details.reason == "max_output_tokens"


def test_a_stream_s_events_make_the_whole_response(serve_sim, ours):
    with serve_sim() as served:
        whole = served.client().responses.create(**fields())
        events = list(served.client().responses.create(**fields(stream=True)))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert [event.type for event in events[:4]] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
    ]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert "".join(deltas) == ours.text
    *_, text, part, item, last = events
    assert (text.type, text.text) == ("response.output_text.done", ours.text)
    assert part.part.text == item.item.content[0].text == ours.text
    assert last.type == f"response.{whole.status}"
    volatile = {"id", "created_at", "weight_version"}
    one, other = last.response.to_dict(), whole.to_dict()
    ids = {one["output"][0].pop("id"), other["output"][0].pop("id")}
    assert len(ids) == 2
    assert {name: one[name] for name in one.keys() - volatile} == {
        name: other[name] for name in other.keys() - volatile
    }


def test_a_developer_s_message_is_the_system_s(serve_sim, ours):
    given = [{"role": "developer", "content": "be quick"}, *INPUT]
    with serve_sim() as served:
        answer = post(served, input=given, max_output_tokens=24, group="g", store=False, tools=[], include=[])
    assert answer.status_code == 200, answer.text
    assert answer.json()["output"][0]["content"][0]["text"] == ours.text


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "c"}]}, "input"),
        ({"input": 4}, "input"),
        ({"tools": [{"type": "web_search"}]}, "tools"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
        ({"max_tokens": 4}, "max_tokens"),
        ({"text": {"format": {"type": "json_object"}}}, "text"),
        ({"text": {"format": {"type": "json_schema", "schema": {}}}}, "text"),
        ({"text": {"format": {"type": "json_schema"}}}, "text"),
        ({"text": {"format": {"type": "xml"}}}, "text"),
        ({"top_logprobs": 2}, "top_logprobs"),
    ],
)
def test_what_cannot_be_done_is_refused_by_its_name(serve_sim, fields, param):
    with serve_sim() as served:
        answer = post(served, **fields)
        assert post(served, max_output_tokens=2, text={"verbosity": "low"}).status_code == 200
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param, json.dumps(answer.json())
