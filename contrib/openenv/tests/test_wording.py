"""Turns as actions, and observations as texts."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from seer_openenv.wording import NoAction, action_of, content_of

from seer_core.errors import ConfigError

CALL = {"type": "call_tool", "tool_name": "add", "arguments": {"a": 2}}


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ('{"move": 3}', {"move": 3}),
        (' {"move": {"to": [1]}}\n', {"move": {"to": [1]}}),
        ('```json\n{"move": 3}\n```', {"move": 3}),
        ('{"name": "add", "arguments": {"a": 2}}', CALL),
        ('I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2}}\n', CALL),
        ('<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call> so', CALL),
        ('<tool_call>{"a": 1}</tool_call><tool_call>{"b": 2}', {"b": 2}),
        ('{"name": "add", "arguments": {}, "more": 1}', {"name": "add", "arguments": {}, "more": 1}),
        ("the answer is \\boxed{5}", None),
        ("", None),
    ],
)
def test_a_text_is_an_action_written_as_json_the_call_of_a_tool_or_neither(text, action):
    assert action_of(text, None) == action


@pytest.mark.parametrize("text", ["{", '<tool_call>{"name": ', "<tool_call>", "```\n[1]\n```", '{"a": NaN}'])
def test_a_text_that_begins_as_an_action_and_is_none_has_a_reason_for_the_model(text):
    with pytest.raises(NoAction, match=r"no JSON|a JSON object"):
        action_of(text, None)


def test_a_deep_text_has_a_reason_too():
    with pytest.raises(NoAction):
        action_of('{"a":' * 100_000, None)


@given(st.text())
def test_a_field_takes_any_text(text):
    assert action_of(text, "message") == {"message": text.strip()}


@given(st.text())
def test_no_text_does_harm(text):
    for each in (text, "{" + text, "<tool_call>" + text, "```" + text):
        try:
            found = action_of(each, None)
        except NoAction:
            continue
        assert found is None or isinstance(found, dict)


def result(data=None, *texts):
    content = [{"type": "text", "text": text} for text in texts]
    return {"content": content, "structured_content": None, "data": data, "is_error": False}


@pytest.mark.parametrize(
    ("observation", "field", "content"),
    [
        ({"reply": "hello", "metadata": {"secret": 1}}, "reply", "hello"),
        ({"reply": "hello", "length": 5, "metadata": {}}, None, '{"reply":"hello","length":5}'),
        ({"board": [[0, 1]], "metadata": {}}, "board", "[[0,1]]"),
        ({"tool_name": "add", "result": result(5, "5"), "error": None}, None, "5"),
        ({"tool_name": "say", "result": result("five"), "error": None}, None, "five"),
        ({"tool_name": "say", "result": result(None, "one", "two"), "error": None}, None, "one\ntwo"),
        ({"tool_name": "add", "result": 7, "error": None}, None, "7"),
        (
            {"tool_name": "add", "result": None, "error": {"error_type": "timeout", "message": "late"}},
            None,
            '{"error":"late"}',
        ),
    ],
)
def test_an_observation_is_a_field_the_result_of_a_tool_or_all_but_metadata(observation, field, content):
    assert content_of(observation, field) == content


def test_a_field_that_the_observation_lacks_is_an_error_that_names_those_it_has():
    with pytest.raises(ConfigError, match=r"without 'text'; it has \['length', 'reply'\]"):
        content_of({"reply": "a", "length": 1, "metadata": {}}, "text")
