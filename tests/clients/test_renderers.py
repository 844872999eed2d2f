"""renderers, by which the train clients of verifiers and prime-rl send tokens and receive tokens."""

import asyncio

import openai
import pytest
from renderers.client import OverlongPromptError, generate
from renderers.default import DefaultRenderer
from transformers import AutoTokenizer

MESSAGES = [{"role": "user", "content": "ring 92 hop 15 from 62 to 60 ?"}]


@pytest.fixture
def ask(server):
    """Return a function that asks for a completion in tokens, of a prompt that its renderer makes."""
    renderer = DefaultRenderer(AutoTokenizer.from_pretrained(server.model))

    def ask(**fields):
        async def run():
            async with openai.AsyncOpenAI(base_url=server.url, api_key=server.token) as client:
                return await generate(
                    client=client, renderer=renderer, messages=MESSAGES, model="seer", **fields
                )

        return asyncio.run(asyncio.wait_for(run(), 600))

    return ask


def test_tokens_come_with_their_log_probs_and_are_those_of_a_chat(ask, client):
    sampling = {"max_tokens": 60, "seed": 5, "temperature": 0.9}
    found = ask(sampling_params=sampling)
    asked = {"model": "seer", "messages": MESSAGES, "logprobs": True, **sampling}
    answer = client.chat.completions.create(**asked, extra_body={"return_token_ids": True})
    [choice] = answer.choices
    assert found["prompt_ids"] == answer.prompt_token_ids
    assert found["completion_ids"] == choice.token_ids
    assert found["completion_logprobs"] == [each.logprob for each in choice.logprobs.content]
    assert found["content"].strip() == choice.message.content.strip()
    assert found["finish_reason"] == choice.finish_reason


def test_a_prompt_that_is_too_long_is_refused_before_it_is_sent(ask):
    with pytest.raises(OverlongPromptError):
        ask(max_prompt_len=3)
