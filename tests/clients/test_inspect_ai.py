"""inspect-ai, by its provider for OpenAI's API and by that for vLLM's server."""

import asyncio

import pytest
from inspect_ai import Task, eval
from inspect_ai.dataset import Sample
from inspect_ai.model import GenerateConfig, get_model
from inspect_ai.scorer import includes

QUESTION = "ring 92 hop 15 from 62 to 60 ?"


@pytest.fixture(params=["openai-api/seer/seer", "vllm/seer"])
def model(server, request):
    """Return a function that makes inspect's model, with settings of how it writes."""

    def make(**settings):
        config = GenerateConfig(max_tokens=60, seed=5, **settings)
        return get_model(
            request.param, base_url=server.url, api_key=server.token, config=config, memoize=False
        )

    return make


def test_answers_end_before_stop_sequences_and_have_log_probs_and_choices(model):
    def ask(**settings):
        return asyncio.run(asyncio.wait_for(model(**settings).generate(QUESTION), 600))

    free = ask().completion
    stop = free[10:12]
    held = ask(stop_seqs=[stop], logprobs=True, top_logprobs=2)
    assert held.completion == free[: free.index(stop)]
    assert held.stop_reason == "stop"
    assert all(len(each.top_logprobs) == 2 for each in held.choices[0].logprobs.content)
    assert len(ask(num_choices=3).choices) == 3


def test_an_evaluation_of_some_samples_is_scored(model, tmp_path):
    samples = [Sample(input=f"{QUESTION} {number}", target="a") for number in range(4)]
    [log] = eval(
        Task(dataset=samples, scorer=includes()), model=model(), log_dir=str(tmp_path), display="none"
    )
    assert log.status == "success"
    assert log.results.total_samples == log.results.completed_samples == 4
