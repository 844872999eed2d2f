"""lm-eval's models of OpenAI's API, on tasks of both kinds that lie here: nothing is downloaded."""

import json
import math

import pytest
from lm_eval import simple_evaluate
from lm_eval.tasks import TaskManager

ROWS = [
    {
        "question": f"ring 92 hop {hop} from 62 to 60 ?",
        "choices": ["near", "far away", "no"],
        "answer": hop % 3,
    }
    for hop in range(4)
]

WRITES = """
task: rings_write
output_type: generate_until
doc_to_target: "{{choices[answer]}}"
generation_kwargs:
  until: ["a", "e"]
  max_gen_toks: 40
  do_sample: false
metric_list:
  - metric: exact_match
"""
CHOOSES = """
task: rings_choose
output_type: multiple_choice
doc_to_target: answer
doc_to_choice: choices
metric_list:
  - metric: acc
"""
SCORES = """
task: rings_score
output_type: loglikelihood
doc_to_target: "{{choices[answer]}}"
metric_list:
  - metric: perplexity
"""


@pytest.fixture
def evaluate(server, tmp_path):
    """Return a function that evaluates a task with one of lm-eval's models, and returns its samples."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    common = (
        f"dataset_path: json\ndataset_kwargs:\n  data_files:\n    test: {rows}\n"
        'test_split: test\ndoc_to_text: "{{question}}"\n'
    )
    for number, task in enumerate((WRITES, CHOOSES, SCORES)):
        (tmp_path / f"{number}.yaml").write_text(task + common)

    def evaluate(kind, task, path, **more):
        found = simple_evaluate(
            model=kind,
            model_args={
                "model": "seer",
                "base_url": f"{server.url}/{path}",
                "tokenizer": str(server.model),
                "tokenizer_backend": "huggingface",
                "max_retries": 1,
                "timeout": 60,
            },
            tasks=[task],
            task_manager=TaskManager(include_path=str(tmp_path), include_defaults=False),
            log_samples=True,
            bootstrap_iters=0,
            **more,
        )
        return found["samples"][task]

    return evaluate


@pytest.fixture(autouse=True)
def _token(server, monkeypatch, tmp_path):
    monkeypatch.setenv("OPENAI_API_KEY", server.token)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))


def text_of(sample):
    return sample["resps"][0][0]


def test_text_is_written_up_to_a_stop_by_completions_and_chats(evaluate):
    written = evaluate("local-completions", "rings_write", "completions")
    assert len(written) == len(ROWS)
    assert any(text_of(sample) for sample in written)
    assert not any(set("ae") & set(text_of(sample)) for sample in written)
    chatted = evaluate("local-chat-completions", "rings_write", "chat/completions", apply_chat_template=True)
    assert len(chatted) == len(ROWS)
    assert not any(set("ae") & set(text_of(sample)) for sample in chatted)


@pytest.mark.parametrize("task", ["rings_choose", "rings_score"])
def test_log_likelihoods_are_those_of_the_engine(evaluate, client, vocabulary, task):
    samples = evaluate("local-completions", task, "completions")
    assert len(samples) == len(ROWS)
    compared = 0
    for sample in samples:
        for request, response in zip(sample["arguments"], sample["resps"], strict=True):
            context, continuation = request[:2]
            tokens = [vocabulary[letter] for letter in context + continuation]
            [choice] = client.completions.create(
                model="seer",
                prompt=tokens,
                max_tokens=1,
                extra_body={"prompt_logprobs": 1},
            ).choices
            places = [*zip(tokens, choice.prompt_logprobs, strict=True)][-len(continuation) :]
            scores = [place[str(token)]["logprob"] for token, place in places]
            best = [max(place.values(), key=lambda each: each["logprob"])["logprob"] for _, place in places]
            found, greedy = response[0]
            assert math.isclose(float(found), sum(scores), abs_tol=1e-3)
            assert greedy in (scores == best, str(scores == best))
            compared += 1
    assert compared == len(ROWS) * (3 if task == "rings_choose" else 1)
