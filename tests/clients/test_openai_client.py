"""OpenAI's own client: completions, chats and Responses, whole and as streams."""

import openai
import pytest

PROMPT = "ring 92 hop 15 from 62 to 60 ?"
MESSAGES = [{"role": "user", "content": PROMPT}]
QWEN3 = {"top_k": 20, "min_p": 0, "chat_template_kwargs": {"enable_thinking": False}}
"""What Qwen3's page advises for vLLM's server."""


def test_completions_are_the_same_whole_and_streamed_with_all_choices_and_log_probs(client):
    asked = {"model": "seer", "prompt": PROMPT, "n": 3, "max_tokens": 50, "seed": 5, "logprobs": 2}
    whole = client.completions.create(**asked)
    assert whole.usage.completion_tokens == sum(len(each.logprobs.tokens) for each in whole.choices)
    texts, scores, tops, reasons = [""] * 3, [[], [], []], [[], [], []], {}
    for piece in client.completions.create(**asked, stream=True):
        [choice] = piece.choices
        texts[choice.index] += choice.text
        scores[choice.index] += choice.logprobs.token_logprobs
        tops[choice.index] += choice.logprobs.top_logprobs
        if choice.finish_reason:
            reasons[choice.index] = choice.finish_reason
    for choice in whole.choices:
        assert texts[choice.index] == choice.text
        assert scores[choice.index] == choice.logprobs.token_logprobs
        assert tops[choice.index] == choice.logprobs.top_logprobs
        assert reasons[choice.index] == choice.finish_reason
    assert len(set(texts)) == 3


def test_chats_are_the_same_whole_and_streamed_with_top_logprobs(client):
    asked = {"model": "seer", "messages": MESSAGES, "max_completion_tokens": 50, "seed": 6}
    asked |= {"logprobs": True, "top_logprobs": 3}
    [whole] = client.chat.completions.create(**asked).choices
    pieces = [*client.chat.completions.create(**asked, stream=True, stream_options={"include_usage": True})]
    *pieces, last = pieces
    assert last.usage.completion_tokens == len(whole.logprobs.content)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == whole.message.content
    assert [each for piece in pieces for each in piece.choices[0].logprobs.content] == whole.logprobs.content
    assert all(len(each.top_logprobs) == 3 for each in whole.logprobs.content)


def test_an_answer_ends_before_a_stop_string_whole_and_streamed(client):
    asked = {"model": "seer", "messages": MESSAGES, "max_tokens": 200, "seed": 7}
    free = client.chat.completions.create(**asked).choices[0].message.content
    stop = free[20:22]
    [held] = client.chat.completions.create(**asked, stop=[stop]).choices
    assert held.finish_reason == "stop"
    assert held.message.content == free[: free.index(stop)]
    pieces = client.chat.completions.create(**asked, stop=stop, stream=True)
    assert "".join(piece.choices[0].delta.content for piece in pieces) == held.message.content


def test_the_fields_that_qwen3_advises_are_taken(client):
    asked = {
        "model": "seer",
        "messages": MESSAGES,
        "max_tokens": 20,
        "temperature": 0.7,
        "top_p": 0.8,
        "seed": 5,
    }
    plain = client.chat.completions.create(**asked)
    advised = client.chat.completions.create(**asked, presence_penalty=1.5, extra_body=QWEN3)
    assert advised.choices[0].message.content
    assert advised.usage.prompt_tokens == plain.usage.prompt_tokens + 1  # the template has seen its variable


def test_responses_are_the_same_whole_and_streamed_with_log_probs(client):
    asked = {"model": "seer", "input": PROMPT, "max_output_tokens": 30, "top_logprobs": 2}
    asked |= {"include": ["message.output_text.logprobs"], "extra_body": {"seed": 8}}
    whole = client.responses.create(**asked)
    [text] = whole.output[0].content
    assert all(len(each.top_logprobs) == 2 for each in text.logprobs)
    with client.responses.stream(**asked) as stream:
        events = list(stream)
    assert events[-1].type in ("response.completed", "response.incomplete")
    final = events[-1].response
    assert "".join(each.delta for each in events if each.type == "response.output_text.delta") == text.text
    assert final.output_text == whole.output_text
    assert [each.logprob for each in final.output[0].content[0].logprobs] == [
        each.logprob for each in text.logprobs
    ]


def test_models_are_listed_and_wrong_requests_are_the_errors_of_the_client(client, server):
    assert [each.id for each in client.models.list()] == ["seer"]
    assert client.models.retrieve("seer").id == "seer"
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="gpt-7", prompt="a")
    with pytest.raises(openai.BadRequestError, match="best_of is not supported"):
        client.completions.create(model="seer", prompt="a", best_of=2)
    with (
        openai.OpenAI(base_url=server.url, api_key="wrong", max_retries=0) as stranger,
        pytest.raises(openai.AuthenticationError),
    ):
        stranger.completions.create(model="seer", prompt="a")
