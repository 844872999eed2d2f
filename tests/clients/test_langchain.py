"""langchain's model of OpenAI's chats."""

import json
from typing import Literal

import pytest
from langchain_openai import ChatOpenAI, OpenAI
from pydantic import BaseModel

QUESTION = "ring 92 hop 15 from 62 to 60 ?"


class Verdict(BaseModel):
    """The form of an answer."""

    reached: bool
    way: Literal["near", "far"]


@pytest.fixture
def chat(server):
    """Return a function that makes langchain's model, with further fields."""

    def make(**fields):
        given = {"model": "seer", "max_tokens": 60, "seed": 5, "max_retries": 0}
        return ChatOpenAI(base_url=server.url, api_key=server.token, **given | fields)

    return make


def test_answers_are_the_same_invoked_and_streamed(chat):
    whole = chat().invoke(QUESTION)
    assert "".join(piece.text for piece in chat().stream(QUESTION)) == whole.text
    assert whole.usage_metadata["output_tokens"] <= 60
    assert len(chat().batch([QUESTION] * 5)) == 5


def test_log_probs_and_stops_are_taken(chat):
    free = chat().invoke(QUESTION).text
    stop = free[10:12]
    held = chat(logprobs=True, top_logprobs=2).invoke(QUESTION, stop=[stop])
    assert held.text == free[: free.index(stop)]
    scored = held.response_metadata["logprobs"]["content"]
    assert scored
    assert all(len(each["top_logprobs"]) == 2 for each in scored)


def test_completions_have_all_their_choices(server):
    model = OpenAI(base_url=server.url, api_key=server.token, model="seer", n=3, best_of=1, max_tokens=20)
    [choices] = model.generate([QUESTION]).generations
    assert len(choices) == 3


def test_an_answer_has_the_form_of_a_class(chat):
    asked = chat(max_tokens=1000).with_structured_output(Verdict, method="json_schema")
    assert isinstance(asked.invoke(QUESTION), Verdict)
    raw = chat(max_tokens=1000).with_structured_output(Verdict, method="json_schema", include_raw=True)
    last = raw.invoke(QUESTION)
    assert last["parsing_error"] is None
    assert last["parsed"].model_dump() == json.loads(last["raw"].text)
    *_, streamed = (
        chat(max_tokens=1000).with_structured_output(Verdict, method="json_schema").stream(QUESTION)
    )
    assert streamed == last["parsed"]
