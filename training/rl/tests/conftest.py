"""A model small enough to train in a test, and a run of training on simulated engines."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import training_runs

from training_runs import make_model

TASK = Path(__file__).with_name("toy_task.py")

CONFIG = """
[train]
prompts = "toy_task.py:prompts"
reward = "toy_task.py:reward"
iterations = 3
groups = 3
model = "model"
max_dlogp = 0.0  # simulated engines make their log-probs up
[train.optimizer]
learning_rate = 1e-3
[train.torch]
micro_tokens = 128
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "sim"
kv_pool = "none"
[engine.sim]
[engine.sim.lengths]
mean_tokens = 24
[rollout]
n = 4
max_tokens = 40
"""


@pytest.fixture(scope="session")
def model(tmp_path_factory):
    """The directory of a small model with the vocabulary of simulated engines."""
    return make_model(tmp_path_factory.mktemp("model"), 32_000)


@pytest.fixture(scope="session")
def other_model(tmp_path_factory):
    """The directory of a model with another vocabulary."""
    return make_model(tmp_path_factory.mktemp("other"), 512)


@pytest.fixture(scope="session")
def write_training(model):
    """Return a function that writes a config into a folder, with its task and model, and returns its path."""

    def write(folder, reward="return float(response.token_ids[0] % 2)"):
        (folder / "model").symlink_to(model)
        source = TASK.read_text("utf-8").replace("return 0.0  # the test's own", reward)
        (folder / "toy_task.py").write_text(source, "utf-8")
        (folder / "train.toml").write_text(CONFIG, "utf-8")
        return folder / "train.toml"

    return write


@pytest.fixture
def config(write_training, tmp_path):
    """Return the same function for the test's own folder."""
    return partial(write_training, tmp_path)


@pytest.fixture(scope="session")
def uninterrupted(write_training, tmp_path_factory):
    """Return the metrics of three iterations of the tests' config."""
    from training_runs import reproducible, run

    folder = tmp_path_factory.mktemp("whole")
    return reproducible(run(write_training(folder), folder / "out"))
