"""The prompts of each iteration, of a file and of a function."""

import re
from types import SimpleNamespace

import pytest
from seer_host.images import PlacedImages, PromptImage
from seer_rl.errors import TrainError
from seer_rl.prompts import prompts_of
from seer_rl.rewarded_rollout import RewardedRollout

from seer_core.errors import PromptError
from seer_core.model import PromptGroup


def test_a_file_gives_each_iteration_its_next_lines_and_begins_anew(tmp_path):
    (tmp_path / "three.jsonl").write_text('{"prompt":"a"}\n{"prompt":"b"}\n{"prompt":"c"}\n')
    records = prompts_of("[train].prompts", "three.jsonl", tmp_path, 2, 0)
    found = [[(each["group_id"], each["prompt"]) for each in records(iteration)] for iteration in range(2)]
    assert found == [[("0", "a"), ("1", "b")], [("2", "c"), ("3", "a")]]


def test_a_function_is_called_with_iteration_groups_and_seed(tmp_path):
    (tmp_path / "task_of_prompts.py").write_text(
        "def prompts(iteration, groups, seed):\n    yield {'prompt': f'{iteration} {groups} {seed}'}\n"
    )
    records = prompts_of("[train].prompts", "task_of_prompts.py:prompts", tmp_path, 4, 5)
    assert records(3) == [{"prompt": "3 4 5"}]


@pytest.mark.parametrize(
    ("body", "match"),
    [
        ("return []", "gave none for iteration 2; let it return some"),
        ("return 1 / 0", "raised in iteration 2"),
    ],
)
def test_a_function_without_prompts_is_named_with_the_iteration(tmp_path, body, match):
    (tmp_path / "bad_prompts.py").write_text(f"def prompts(iteration, groups, seed):\n    {body}\n")
    records = prompts_of("[train].prompts", "bad_prompts.py:prompts", tmp_path, 4, 5)
    with pytest.raises(PromptError, match=match):
        records(2)


def test_a_file_without_lines_is_refused(tmp_path):
    (tmp_path / "none.jsonl").write_text("")
    with pytest.raises(PromptError, match=r"none\.jsonl holds no prompt; name another file in \[train\]"):
        prompts_of("[train].prompts", "none.jsonl", tmp_path, 2, 0)


def test_a_mark_and_empty_lines_of_a_file_are_left_out_as_by_seer_run(tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(b'\xef\xbb\xbf{"prompt":"a"}\n\n{"prompt":"b"}\r\n')
    records = prompts_of("[train].prompts", file.name, tmp_path, 2, 0)
    assert [each["prompt"] for each in records(7)] == ["a", "b"]
    file.write_text('{"prompt":"a"}\n\n["b"]\n')
    with pytest.raises(PromptError, match=r"prompts\.jsonl:3: no prompts file: expected `object`"):
        prompts_of("[train].prompts", file.name, tmp_path, 1, 0)


ONE_OF = "give exactly one of prompt, prompt_token_ids and messages"


@pytest.mark.parametrize(
    ("line", "flaw"),
    [
        ('{"promt": "b"}', "object contains unknown field `promt`; did you mean 'prompt'"),
        ('{"prompt": 7}', "prompt: expected `str | null`"),
        ('{"prompt": "b", "n": 0}', "n: expected `int` >= 1"),
        ('{"prompt": "b", "temperature": -1}', "temperature: "),
        ('{"prompt": " "}', "the prompt is empty"),
        ('{"messages": []}', "messages holds none"),
        ('{"prompt": "b", "messages": [{"role": "user"}]}', f"{ONE_OF}; got prompt and messages"),
        ('{"n": 2}', f"{ONE_OF}; got none"),
        ('{"prompt": "b", "seed": 1, "seeds": [1]}', "give seed or seeds"),
        ('{"prompt": "b", "chat_template_kwargs": {"a": 1}}', "chat_template_kwargs goes with messages"),
    ],
)
def test_a_line_that_cannot_be_rolled_out_is_named_before_anything_starts(tmp_path, line, flaw):
    (tmp_path / "prompts.jsonl").write_text(f'{{"prompt":"a"}}\n\n{line}\n')
    with pytest.raises(PromptError, match=rf"prompts\.jsonl:3: {re.escape(flaw)}") as caught:
        prompts_of("[train].prompts", "prompts.jsonl", tmp_path, 1, 0)
    assert str(caught.value).endswith("; mend the line, or take it out of [train].prompts")


def test_images_which_the_model_in_training_is_not_shown_are_refused_before_anything_is_written():
    images = PlacedImages([PromptImage("cafe", 1, 1)], [(0, 1)])
    group = PromptGroup("a", (1,), 2, 4, attachments=images)
    session = SimpleNamespace(runtime=SimpleNamespace(groups=lambda records, iteration: [group]))
    with pytest.raises(TrainError, match="group 'a' has images"):
        RewardedRollout(session, None, None).run([{"prompt": "a"}], 0)
