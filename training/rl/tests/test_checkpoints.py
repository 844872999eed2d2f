"""Checkpoints are whole or absent, also after an error while they are written."""

import json
import os
import threading

import pytest
import structlog
from seer_rl.checkpoint_digests import write_digests
from seer_rl.checkpoints import Checkpoints, state_of
from seer_rl.config import load_training
from training_runs import RecordingListener, fail, read_metrics, reproducible, run

from seer_core.errors import ConfigError, InputError, OutputError
from tests.support.patience import PATIENCE_S


@pytest.fixture
def state(config):
    """Return a function that returns the state of a run after so many iterations."""
    table, settings = load_training(config())
    return lambda iterations: state_of(iterations, table, settings, {})


@pytest.fixture
def root(tmp_path):
    return tmp_path / "checkpoints"


def write(directory):
    (directory / "weights").write_text("weights")


def names(root):
    return sorted(path.name for path in root.iterdir())


def test_without_a_checkpoint_there_is_no_latest_one(root):
    assert Checkpoints(root, 2).latest() is None


def test_the_latest_checkpoint_has_its_files_and_its_state(root, state):
    checkpoints = Checkpoints(root, 2)
    checkpoints.save(state(1), write)
    path = checkpoints.save(state(2), write)
    latest = checkpoints.latest()
    assert (latest.path, latest.state) == (path, state(2))
    assert (path / "weights").read_text() == "weights"


def test_only_the_last_checkpoints_are_kept(root, state):
    checkpoints = Checkpoints(root, 2)
    for iterations in (8, 9, 10):
        checkpoints.save(state(iterations), write)
    assert names(root) == ["000009", "000010"]


def test_of_an_old_checkpoint_that_is_a_link_only_the_link_is_deleted(root, state, tmp_path):
    checkpoints = Checkpoints(root, 2)
    checkpoints.save(state(1), write).rename(tmp_path / "on another disk")
    (root / "000001").symlink_to(tmp_path / "on another disk")
    (root / "0").write_text("no checkpoint")
    checkpoints.save(state(2), write)
    checkpoints.save(state(3), write)
    assert names(root) == ["000002", "000003"]
    assert (tmp_path / "on another disk" / "weights").read_text() == "weights"


def make_a_file(path):
    path.write_text("")


def make_a_link_to_nothing(path):
    path.symlink_to("gone")


def make_a_link_to_itself(path):
    path.symlink_to(path.name)


@pytest.mark.parametrize("make", [make_a_file, make_a_link_to_nothing, make_a_link_to_itself, os.mkfifo])
def test_a_directory_of_checkpoints_that_cannot_be_read_is_not_taken_for_an_empty_one(root, make):
    make(root)
    words = r"checkpoints cannot be read: .*; restore it, or begin anew in another directory"
    with pytest.raises(InputError, match=words):
        Checkpoints(root, 2).latest()


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("disk full")])
def test_a_checkpoint_that_cannot_be_written_leaves_no_trace_but_the_one_before(root, state, error):
    def fail(directory):
        write(directory)
        raise error

    checkpoints = Checkpoints(root, 2)
    checkpoints.save(state(1), write)
    with pytest.raises(OutputError, match=r"cannot write the checkpoint .*000002: .*; make room"):
        checkpoints.save(state(2), fail)
    assert names(root) == ["000001"]


def test_a_directory_of_a_killed_process_is_no_checkpoint_and_is_deleted(root, state):
    (root / ".unfinished-abc").mkdir(parents=True)
    checkpoints = Checkpoints(root, 2)
    assert checkpoints.latest() is None
    checkpoints.save(state(1), write)
    assert names(root) == ["000001"]


def test_a_damaged_state_is_refused_with_what_to_do(root, state):
    checkpoints = Checkpoints(root, 2)
    (checkpoints.save(state(1), write) / "training.json").write_text("{")
    words = (
        r"training\.json is no state of training: .*; restore it, or begin anew in another directory, as no"
    )
    with pytest.raises(InputError, match=words):
        checkpoints.latest()
    (checkpoints.save(state(2), write) / "training.json").write_text("{")
    with pytest.raises(InputError, match=r"; delete .*000002 to go on from the one before, .*000001"):
        checkpoints.latest()


def rewrite(path, change):
    file = path / "training.json"
    state = json.loads(file.read_bytes())
    change(state)
    file.write_text(json.dumps(state))
    write_digests(path)


def test_settings_that_a_newer_version_has_written_are_refused_by_name(root, state):
    def add(state):
        state["train"]["loss"]["warmth"] = state["train"]["brand_new"] = state["rollout"]["tone"] = 1
        state["era"] = {"of": 2}

    checkpoints = Checkpoints(root, 2)
    path = checkpoints.save(state(1), write)
    rewrite(path, add)
    words = r"training\.json has era, rollout\.tone, train\.brand_new, train\.loss\.warmth, which this"
    with pytest.raises(
        ConfigError, match=rf"{words} version of Seer lacks; go on with the version that wrote it, or r"
    ):
        checkpoints.latest()


def test_a_checkpoint_of_an_older_version_lacks_settings_and_is_taken(root, state):
    def take(state):
        del state["train"]["replay_routing"], state["train"]["tracking"], state["environment"]
        state["rollout"]["logit_bias"] = {"5": 1}

    checkpoints = Checkpoints(root, 2)
    path = checkpoints.save(state(1), write)
    rewrite(path, take)
    assert checkpoints.latest().state.train == state(1).train


def test_a_run_whose_checkpoints_are_gone_does_not_begin_anew_over_its_metrics(config, tmp_path):
    path, out = config(), tmp_path / "out"
    run(path, out, "train.iterations=2")
    metrics = (out / "metrics.jsonl").read_text()
    (out / "checkpoints").rename(tmp_path / "away")
    with pytest.raises(OutputError, match=r"has 2 iterations, and .*checkpoints no checkpoint to go on from"):
        run(path, out, resume=True)
    assert (out / "metrics.jsonl").read_text() == metrics
    (out / "metrics.jsonl").write_text(metrics.splitlines(keepends=True)[0])  # as one that died at its first
    with structlog.testing.capture_logs() as logs:
        run(path, out, "train.iterations=2", resume=True)
    assert [each["reason"] for each in logs if each["event"] == "training_begins_anew"] == [
        "iterations done without a checkpoint: 1"
    ]
    assert [line["iteration"] for line in read_metrics(out)] == [0, 1]


def test_a_checkpoint_is_written_while_the_next_rollout_goes_on(config, tmp_path, monkeypatch, uninterrupted):
    from seer_rl.torch_trainer import TorchTrainer

    rolling, save, waited = threading.Event(), TorchTrainer.save, []

    def slow(self, directory):
        if self._updates == 1:
            waited.append(rolling.wait(PATIENCE_S))
        save(self, directory)

    monkeypatch.setattr(TorchTrainer, "save", slow)
    run(config(), tmp_path / "out", listener=RecordingListener((1, "rollout"), rolling.set))
    assert waited == [True]
    assert reproducible(read_metrics(tmp_path / "out")) == uninterrupted


def test_a_full_disk_at_a_checkpoint_leaves_the_one_before(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    path, out = config(), tmp_path / "out"
    save = TorchTrainer.save

    def full(self, directory):
        if self._updates == 2:
            raise OSError(28, "No space left on device")
        save(self, directory)

    monkeypatch.setattr(TorchTrainer, "save", full)
    with pytest.raises(OutputError, match="No space left"):
        run(path, out)
    assert [one.name for one in (out / "checkpoints").iterdir()] == ["000001"]


def test_a_failed_checkpoint_is_logged_beside_the_error_that_ended_training(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    def full(self, directory):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(TorchTrainer, "save", full)
    path = config()
    with structlog.testing.capture_logs() as logs, pytest.raises(OSError, match="interrupted"):
        run(path, tmp_path / "both", listener=RecordingListener((1, "rollout"), fail))
    [logged] = [log for log in logs if log["event"] == "checkpoint_failed"]
    assert "No space left on device" in logged["reason"]
    with structlog.testing.capture_logs() as logs, pytest.raises(OutputError, match="No space left"):
        run(path, tmp_path / "alone")
    assert "checkpoint_failed" not in [log["event"] for log in logs]
