"""The start of a run: settings that are refused, directories of other runs, prompts of a file."""

import json
import shutil

import pytest
from training_runs import RecordingListener, read_metrics, reproducible, run, seer_train

from seer_core.errors import ConfigError, InputError, OutputError, PromptError


def test_another_run_is_neither_written_over_nor_gone_on_from(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    with pytest.raises(OutputError, match="--resume"):
        run(path, out)
    with pytest.raises(ConfigError, match=r"\[train\]\.optimizer, \[seer\]\.seed changed"):
        run(path, out, "seer.seed=3", "train.optimizer.warmup=2", resume=True)
    shutil.copytree(path.parent / "model", path.parent / "copy")
    changes = ("train.model=copy", "rollout.n=3", "rollout.max_tokens=30")
    with pytest.raises(ConfigError, match=r"model, \[rollout\]\.n, \[rollout\]\.max_tokens changed"):
        run(path, out, *changes, resume=True)
    (out / "checkpoints" / "000001" / "training.json").write_text("{")
    with pytest.raises(InputError, match="no state of training"):
        run(path, out, resume=True)


def test_a_run_goes_on_with_more_patience_for_its_ranks_as_the_error_of_a_slow_one_proposes(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    run(path, out, "train.iterations=2", "train.megatron.timeout_s=900", resume=True)
    assert len(read_metrics(out)) == 2


def test_a_second_run_in_one_directory_at_a_time_is_refused_and_the_first_goes_on(
    config, tmp_path, uninterrupted
):
    path, out = config(), tmp_path / "out"

    def run_again():
        with pytest.raises(OutputError, match=r"another run is training into .*out"):
            run(path, out, resume=True)

    run(path, out, listener=RecordingListener((1, "rewards"), run_again))
    assert reproducible(read_metrics(out)) == uninterrupted


@pytest.mark.parametrize(
    ("override", "error", "match"),
    [
        (
            "train.iteratons=3",
            ConfigError,
            r"unknown key 'iteratons' in \[train\]; did you mean 'iterations'",
        ),
        ("train.loss.clip=3", ConfigError, r"\[train.loss\]"),
        ("train.reward=toy_task.py:rewrd", ConfigError, r"\[train\].reward: 'toy_task.py:rewrd' cannot"),
        ("train.prompts=toy_task.py:promts", ConfigError, r"\[train\].prompts: 'toy_task.py:promts' cannot"),
        ("train.evaluation.prompts=x", ConfigError, r"\[train.evaluation\].prompts: 'x' names no function"),
        ("train.trainer=torhc", ConfigError, r"'torhc' is none; use 'torch' or 'megatron', or name one"),
        ("train.trainer=builtins:print", ConfigError, "made a NoneType, which is no trainer"),
        ("train.trainer=toy_task.py:reward", ConfigError, "reward' raised TypeError: .*; it is called with"),
        ("train.torch.device=gpu", ConfigError, r"\[train.torch\].device: torch cannot use 'gpu': .*; use"),
        ("train.prompts=gone.jsonl", PromptError, "gone.jsonl"),
        ("train.model=nowhere", ConfigError, "nowhere, is no directory"),
        (f"train.model={'y' * 5000}", ConfigError, r"yyy\.\.\. .*, is no directory"),
        ('train.model="a\\u0000b"', ConfigError, "train.model holds the character zero"),
        ("train.model=loop", ConfigError, "loop, is no directory"),
        (f"train.prompts={'y' * 5000}.py:prompts", ConfigError, r"yyy\.\.\. .*, which is not there"),
        ("train.megatron.tensor_parallel=0", ConfigError, r"\[train\].megatron.tensor_parallel: expected"),
        ("rollout.temperature=0.5", Exception, "temperature 0.5"),
    ],
)
def test_an_error_names_the_wrong_setting(config, tmp_path, override, error, match):
    (tmp_path / "loop").symlink_to("loop")
    with pytest.raises(error, match=match):
        run(config(), tmp_path / "out", override)


def test_a_trainer_with_another_vocabulary_than_the_engines_is_refused(config, tmp_path, other_model):
    result = seer_train(config(), tmp_path / "out", f"train.model={other_model}")
    assert result.exit_code == 2
    assert "the trainer's model has 512 tokens and the engines' 32000" in result.stderr


def test_prompts_that_are_none_are_one_error(config, tmp_path):
    path = config()
    with (tmp_path / "toy_task.py").open("a") as file:
        file.write("\n\ndef nothing(iteration, groups, seed):\n    return []\n")
    with pytest.raises(PromptError, match=r"'toy_task\.py:nothing' gave none for iteration 0"):
        run(path, tmp_path / "out", "train.prompts=toy_task.py:nothing")


def test_prompts_of_a_file_are_taken_in_turn(config, tmp_path):
    path = config("return float(response.token_ids[0] % 2) if response.metadata['name'] in 'ABC' else 9.0")
    lines = [json.dumps({"prompt": name, "metadata": {"name": name}}) for name in "ABC"]
    (tmp_path / "prompts.jsonl").write_text("\n".join(lines))
    rows = run(path, tmp_path / "out", "train.prompts=prompts.jsonl", "train.groups=2", "train.iterations=2")
    assert [row["responses"] for row in rows] == [8, 8]
    assert max(row["reward_mean"] for row in rows) < 1
