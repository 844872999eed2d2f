"""Damage to checkpoints: each kind in each file is found, and named in one sentence with the one before."""

import json
import os
import re
import shutil

import pytest
import structlog
import torch
from seer_rl.checkpoints import Checkpoints
from seer_rl.config import load_training
from seer_rl.training_run import _make_trainer
from training_runs import read_metrics, reproducible, run, seer_train

from seer_core.errors import SeerError
from tests.support.damage import damage, unlike


@pytest.fixture(scope="session")
def trained(write_training, tmp_path_factory):
    """The config of a training of two iterations, and its checkpoints."""
    folder = tmp_path_factory.mktemp("damage")
    config = write_training(folder)
    run(config, folder / "out", "train.iterations=2")
    return config, folder / "out" / "checkpoints"


@pytest.fixture
def copied(trained, tmp_path):
    """The config, and a copy of the checkpoints that may be damaged."""
    return trained[0], shutil.copytree(trained[1], tmp_path / "checkpoints")


@pytest.fixture(scope="session")
def trainer(trained):
    return _make_trainer(*load_training(trained[0], ()))


def refusal(checkpoints):
    """Return why the latest checkpoint is refused, empty if it is not."""
    try:
        checkpoints.latest()
    except SeerError as error:
        return str(error)
    return ""


def test_each_damage_to_each_file_is_found_and_the_checkpoint_before_is_named(copied):
    _, root = copied
    checkpoints, latest, before = Checkpoints(root, 2), root / "000002", root / "000001"
    files = sorted(path.name for path in latest.iterdir())
    assert {"digests.json", "model.safetensors", "optimizer.pt", "training.json"} < set(files)
    assert checkpoints.latest().path == latest
    for name in files:
        content = (latest / name).read_bytes()
        for what, damaged in unlike(content):
            damage(latest / name, damaged)
            found = refusal(checkpoints)
            assert found.endswith(f"; delete {latest} to go on from the one before, {before}"), (name, what)
            assert name == "digests.json" or name in found, what
            assert "\n" not in found, what
        (latest / name).write_bytes(content)
    assert checkpoints.latest().path == latest


def test_what_is_no_file_and_what_the_digests_do_not_name_is_refused_at_once(copied):
    _, root = copied
    checkpoints, latest = Checkpoints(root, 2), root / "000002"
    named = json.loads((latest / "digests.json").read_text())
    model = named.pop("model.safetensors")
    refusals = {}

    def refused(what, names):
        (latest / "digests.json").write_text(json.dumps(names))
        refusals[what] = refusal(checkpoints)

    refused("not named", named)
    for name in ("/dev/zero", "../000001/training.json", "no/such/file"):
        refused(name, {**named, "model.safetensors": model, name: model})
    for name in ("digests.json", "training.json"):
        (latest / name).unlink()
        os.mkfifo(latest / name)  # a reader would wait for a writer
        refusals[f"a pipe, {name}"] = refusal(checkpoints)
        (latest / name).unlink()
    assert f"{latest / 'model.safetensors'} is not a file that" in refusals.pop("not named")
    for what, found in refusals.items():
        assert "is no file" in found, what
        assert found.endswith(f"; delete {latest} to go on from the one before, {root / '000001'}"), what


def without_digests(root):
    """Make a checkpoint one of a version that wrote no digests."""
    latest = root / "000002"
    (latest / "digests.json").unlink()
    state = json.loads((latest / "training.json").read_text())
    del state["digests"]
    (latest / "training.json").write_text(json.dumps(state))
    return latest


def load(checkpoints, trainer):
    """Load the latest checkpoint; return why it is refused, empty if it is not."""
    try:
        checkpoint = checkpoints.latest()
        with checkpoints.loading(checkpoint):
            trainer.load(checkpoint.path)
    except SeerError as error:
        return str(error)
    return ""


def test_damage_to_a_checkpoint_without_digests_is_one_sentence_or_none(copied, trainer):
    _, root = copied
    checkpoints, latest = Checkpoints(root, 2), without_digests(root)
    ends = set()
    for name in sorted(path.name for path in latest.iterdir()):
        content = (latest / name).read_bytes()
        for what, damaged in unlike(content):
            damage(latest / name, damaged)
            error = load(checkpoints, trainer)
            ends.add("refused" if error else "loaded")
            assert not error or str(root / "000001") in error, (name, what, error)
        (latest / name).write_bytes(content)
    assert ends == {"loaded", "refused"}


def test_a_checkpoint_without_digests_is_gone_on_from_with_a_warning(copied):
    _, root = copied
    latest = without_digests(root)
    with structlog.testing.capture_logs() as logs:
        assert Checkpoints(root, 2).latest().path == latest
    [warning] = [log for log in logs if log["event"] == "checkpoint_unchecked"]
    assert (warning["log_level"], str(latest) in warning["reason"]) == ("warning", True)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda state: state.pop("optimizer"), "KeyError: 'optimizer'"),
        (lambda state: state.pop("random"), "KeyError: 'random'"),
        (lambda state: state.update(updates="2"), "the number of updates is '2'"),
        (lambda state: state.update(updates=-1), "the number of updates is -1"),
        (lambda state: state.update(random=[1]), "AttributeError"),
        (lambda state: state.update(optimizer=7), "AttributeError"),
        (lambda state: state["optimizer"].pop("param_groups"), "KeyError: 'param_groups'"),
        (
            lambda state: state["optimizer"]["state"][0].update(exp_avg=state["random"]),
            "exp_avg has the shape",
        ),
    ],
)
def test_an_optimizer_s_file_of_another_content_is_one_error(copied, trainer, change, words):
    _, root = copied
    latest = without_digests(root)
    state = torch.load(latest / "optimizer.pt", weights_only=True)
    change(state)
    torch.save(state, latest / "optimizer.pt")
    checkpoints = Checkpoints(root, 2)
    checkpoint = checkpoints.latest()
    pattern = rf"optimizer\.pt is no state of an optimizer: .*{re.escape(words)}"
    with pytest.raises(SeerError, match=pattern), checkpoints.loading(checkpoint):
        trainer.load(checkpoint.path)


def test_what_a_whole_checkpoint_s_trainer_raises_is_not_called_damage(copied):
    _, root = copied
    checkpoints = Checkpoints(root, 2)
    checkpoint = checkpoints.latest()
    words = "whose files are as they were written: MemoryError: none left; mend"
    with pytest.raises(SeerError, match=words), checkpoints.loading(checkpoint):
        raise MemoryError("none left")


def test_a_state_of_another_iteration_is_damage(copied):
    _, root = copied
    shutil.copytree(root / "000001", root / "000007")
    with pytest.raises(
        SeerError, match=r"000007/training\.json is damaged: .*; delete .*000007 to go on from"
    ):
        Checkpoints(root, 2).latest()


@pytest.mark.parametrize("name", ["model.safetensors", "optimizer.pt", "config.json", "training.json"])
def test_a_flipped_bit_ends_a_resumed_training_and_the_checkpoint_before_gives_the_same_losses(
    config, trained, tmp_path, uninterrupted, name
):
    path, out = config(), tmp_path / "out"
    shutil.copytree(trained[1].parent, out)
    file = out / "checkpoints" / "000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 4
    file.write_bytes(content)
    metrics = (out / "metrics.jsonl").read_bytes()
    refused = seer_train(path, out, resume=True)
    assert refused.exit_code == 2
    [error] = [line for line in refused.stderr.splitlines() if line.startswith("error: ")]
    assert error.endswith(f"; delete {file.parent} to go on from the one before, {out}/checkpoints/000001")
    assert (out / "metrics.jsonl").read_bytes() == metrics
    shutil.rmtree(file.parent)
    if name == "model.safetensors":  # once is enough
        assert seer_train(path, out, resume=True).exit_code == 0
        assert reproducible(read_metrics(out)) == uninterrupted


def test_a_checkpoint_follows_the_umask(copied, tmp_path):
    _, root = copied
    state = Checkpoints(root, 2).latest().state
    new = Checkpoints(tmp_path / "new", 2).save(state, lambda directory: (directory / "x").write_text("x"))
    (tmp_path / "usual").mkdir()
    assert new.stat().st_mode == (tmp_path / "usual").stat().st_mode
    assert (root / "000002" / "model.safetensors").stat().st_mode & 0o777 == 0o600  # as SECURITY.md says
