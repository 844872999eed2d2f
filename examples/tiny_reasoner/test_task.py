"""Tests of the ring-hop task; they need neither torch nor the model."""

import json
import random
import statistics
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE))

import task  # noqa: E402


def problems(count: int, seed: int = 5) -> list[task.Problem]:
    rng = random.Random(seed)
    return [task.make_problem(rng) for _ in range(count)]


def bundled_rows() -> list[dict]:
    return [json.loads(line) for line in (HERE / "prompts.jsonl").read_text().splitlines()]


def test_the_teacher_is_always_rewarded() -> None:
    rng = random.Random(6)
    for problem in problems(100):
        response = task.write_response(problem, rng)
        assert task.reward(problem.metadata(), response) == 1.0
        assert task.reward(problem.metadata(), f"{response} {task.EOS}") == 1.0


def test_a_wrong_answer_earns_nothing() -> None:
    metadata = task.Problem(ring=83, hop=45, start=60, goal=74).metadata()
    assert metadata["answer"] == "04"
    assert task.reward(metadata, "found answer 0 4") == 1.0
    for text in ("found answer 0 5", "answer none", "answer 4", "answer 0 4 then # 0 5", "found", ""):
        assert task.reward(metadata, text) == 0.0


def test_a_goal_beyond_the_limit_is_answered_with_none() -> None:
    problem = task.Problem(ring=97, hop=10, start=0, goal=70 * 10 % 97)
    assert problem.answer == "none"
    assert task.reward(problem.metadata(), task.write_response(problem, random.Random(0))) == 1.0


def test_the_same_seed_gives_the_same_prompts() -> None:
    assert list(task.prompt_rows(20, 8, 3)) == list(task.prompt_rows(20, 8, 3))
    assert list(task.prompt_rows(20, 8, 3)) != list(task.prompt_rows(20, 8, 4))


def test_the_bundled_prompts_are_those_of_seed_one() -> None:
    assert bundled_rows() == list(task.prompt_rows(48, 8, 1))


def test_the_vocabulary_covers_what_is_written_and_nothing_else() -> None:
    rng = random.Random(7)
    written: set[int] = set()
    for problem in problems(400):
        written.update(task.encode(problem.prompt), task.encode(task.write_response(problem, rng)))
    special = {task.PAD, task.BOS, task.EOS, task.UNK}
    assert {task.VOCABULARY[i] for i in written} == set(task.VOCABULARY) - special
    assert task.encode("ring zebra") == [task.TOKEN_IDS["ring"], task.TOKEN_IDS[task.UNK]]


def test_teacher_lengths_are_heavy_tailed_and_shared_within_groups() -> None:
    rng = random.Random(8)
    groups = [
        [len(task.encode(task.write_response(problem, rng))) for _ in range(4)]
        for problem in problems(100, seed=9)
    ]
    lengths = sorted(length for group in groups for length in group)
    median, p99 = lengths[len(lengths) // 2], lengths[len(lengths) * 99 // 100]
    assert 180 < median < 320
    assert 280 < statistics.fmean(lengths) < 450
    assert p99 > 4 * median
    assert lengths[-1] < 4096
    assert task.group_share(groups) > 0.6


def test_group_share_is_one_between_and_zero_within() -> None:
    assert task.group_share([[1, 1], [5, 5]]) == 1.0
    assert task.group_share([[1, 5], [5, 1]]) == 0.0


def test_the_tokenizer_agrees_with_the_task() -> None:
    tokenizers = pytest.importorskip("tokenizers", reason="tokenizers is not installed")
    tokenizer = tokenizers.Tokenizer.from_file(str(HERE / "weights" / "tokenizer.json"))
    problem = problems(1)[0]
    response = task.write_response(problem, random.Random(0))
    bos = task.TOKEN_IDS[task.BOS]
    assert tokenizer.encode(problem.prompt).ids == [bos, *task.encode(problem.prompt)]
    assert tokenizer.decode(task.encode(response)) == response
    assert tokenizer.encode("ring zebra", add_special_tokens=False).ids == task.encode("ring zebra")


def test_messages_become_the_same_prompt() -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    tokenizer = transformers.AutoTokenizer.from_pretrained(HERE / "weights")
    prompt = problems(1)[0].prompt
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
    )
    assert tokenizer.encode(text, add_special_tokens=False) == tokenizer.encode(prompt)
