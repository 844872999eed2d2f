"""How new weights get to the engines: both transports carry the same tensors."""

import subprocess
import sys

import pytest
from training_runs import reproducible, run

from seer_core.errors import ConfigError


def test_weights_go_by_shared_memory_as_by_a_directory(config, tmp_path):
    path = config()
    by_directory = run(path, tmp_path / "directory", "train.iterations=2")
    shared = run(path, tmp_path / "shared", "train.iterations=2", "train.weights=shared_memory")
    assert reproducible(shared) == reproducible(by_directory)
    assert (tmp_path / "directory" / "weights").exists()
    assert not (tmp_path / "shared" / "weights").exists()
    again = run(path, tmp_path / "shared", "train.weights=shared_memory", resume=True)
    assert [line["iteration"] for line in again] == [2]


def test_a_trainer_that_cannot_share_its_weights_is_refused(config, tmp_path, monkeypatch):
    from seer_rl.torch_trainer import TorchTrainer

    monkeypatch.delattr(TorchTrainer, "tensors")
    with pytest.raises(ConfigError, match="needs a trainer with a method `tensors`, which 'torch' has not"):
        run(config(), tmp_path / "out", "train.weights=shared_memory")


def test_a_disk_that_is_full_when_weights_are_written_is_one_error(config, tmp_path):
    program = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
from seer_main import main
main()
"""
    out = tmp_path / "out"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", str(config()), "--out", str(out)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert f"cannot write the weights to {out / 'weights'}" in done.stderr
    assert "Traceback" not in done.stderr
    assert not (out / "checkpoints").exists()
