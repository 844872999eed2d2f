"""litellm, by each of its providers that speak OpenAI's API."""

import litellm
import pytest

MESSAGES = [{"role": "user", "content": "ring 92 hop 15 from 62 to 60 ?"}]


@pytest.fixture
def ask(server):
    """Return a function that asks by a provider, with a seed."""

    def ask(provider, **fields):
        return litellm.completion(
            model=f"{provider}/seer",
            api_base=server.url,
            api_key=server.token,
            messages=MESSAGES,
            max_tokens=60,
            seed=5,
            **fields,
        )

    return ask


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm", "text-completion-openai"])
def test_answers_are_the_same_whole_and_streamed(ask, provider):
    [whole] = ask(provider).choices
    pieces = ask(provider, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole.message.content
    assert len(ask(provider, n=3).choices) == 3


@pytest.mark.parametrize("provider", ["openai", "hosted_vllm"])
def test_no_limit_of_top_k_and_a_stop_are_taken(ask, provider):
    free = ask(provider).choices[0].message.content
    stop = free[10:12]
    held = ask(provider, stop=[stop], top_k=-1, logprobs=True, top_logprobs=2).choices[0]
    assert held.message.content == free[: free.index(stop)]
    assert held.finish_reason == "stop"
    assert all(len(each.top_logprobs) == 2 for each in held.logprobs.content)
