"""Runs that ended anywhere, by error or SIGKILL, and are resumed with the same losses."""

import os
import re
import shutil
import signal
import subprocess
import sys

import pytest
from seer_rl.errors import TrainError
from training_runs import RecordingListener, fail, read_metrics, reproducible, run, seer_train

from seer_core.errors import ConfigError, InputError
from tests.support.eventually import eventually


@pytest.mark.parametrize("phase", ["rollout", "rewards", "training", "weights", "checkpoint"])
def test_training_that_broke_off_anywhere_goes_on_with_the_same_losses(
    config, tmp_path, phase, uninterrupted
):
    path, out = config(), tmp_path / "out"
    with pytest.raises(OSError, match="interrupted"):
        run(path, out, listener=RecordingListener((1, phase), fail))
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["000001"]
    run(path, out, resume=True)
    assert reproducible(read_metrics(out)) == uninterrupted


def test_training_that_was_killed_goes_on_with_the_same_losses(config, tmp_path, uninterrupted):
    path, out = config(), tmp_path / "out"
    command = [
        sys.executable,
        "-c",
        "from seer_main import main; main()",
        "train",
        str(path),
        "--out",
        str(out),
    ]
    with (tmp_path / "stderr").open("w") as stderr:
        killed = subprocess.Popen([*command, "--set", "train.iterations=500"], stderr=stderr)
    try:
        eventually(lambda: killed.poll() is not None or (out / "checkpoints" / "000001").exists())
        assert killed.poll() is None, (tmp_path / "stderr").read_text()
    finally:
        killed.kill()
        killed.wait()
    for each in (out / "checkpoints").iterdir():  # as if it had been killed in the second iteration
        if each.name != "000001":
            shutil.rmtree(each)
    done = subprocess.run([*command, "--resume"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert reproducible(read_metrics(out)) == uninterrupted


def test_going_on_where_nothing_is_left_or_nothing_began(config, tmp_path):
    path, out = config(), tmp_path / "out"
    begun = seer_train(
        path, out, "train.iterations=1", "train.evaluation.prompts=toy_task.py:prompts", resume=True
    )
    assert begun.exit_code == 0, begun.stderr
    assert re.search(r"iteration 1 of 1  reward 0\.\d+( +held out 0\.\d+){2} .* tokens/s ", begun.stderr)
    left = seer_train(path, out, "train.iterations=1", resume=True)
    assert left.exit_code == 0
    assert "all 1 iterations are done" in left.stdout


@pytest.mark.parametrize(
    "damage", [os.unlink, lambda file: os.truncate(file, 0), lambda file: os.truncate(file, 9)]
)
def test_a_checkpoint_whose_optimizer_is_damaged_is_one_error(config, tmp_path, damage):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=1")
    damage(out / "checkpoints" / "000001" / "optimizer.pt")
    with pytest.raises(
        InputError,
        match=r"optimizer.pt is (no file, and one was|damaged: .* were) written; restore it, or begin anew",
    ):
        run(path, out, resume=True)


@pytest.mark.long
def test_a_rank_of_megatron_that_is_lost_is_one_error_and_training_goes_on_as_if_it_had_not(
    config, tmp_path, monkeypatch
):
    pytest.importorskip("megatron", reason="Megatron-core is not installed: `make setup` installs it")
    from seer_rl.megatron import MegatronTrainer

    path, out = config(), tmp_path / "out"
    parallel = ("train.trainer=megatron", "train.megatron.data_parallel=2")
    expected = run(path, tmp_path / "whole", *parallel)
    train = MegatronTrainer.train
    calls = []

    def lose_a_rank(self, samples):
        calls.append(self)
        if len(calls) == 2:
            os.kill(self._ranks.pids[1], signal.SIGKILL)
        return train(self, samples)

    with monkeypatch.context() as patch:
        patch.setattr(MegatronTrainer, "train", lose_a_rank)
        with pytest.raises(TrainError, match="rank 1 of the trainer was killed by SIGKILL"):
            run(path, out, *parallel)
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["000001"]
    run(path, out, *parallel, resume=True)
    assert reproducible(read_metrics(out)) == reproducible(expected)
    with pytest.raises(ConfigError, match=r"\[train\].megatron changed"):
        run(path, out, *parallel, "train.megatron.tensor_parallel=2", "train.iterations=4", resume=True)
