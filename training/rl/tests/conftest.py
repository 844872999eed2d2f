"""A model small enough to train in a test, and a run of training on simulated engines."""

import sys
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # tests import training_runs

from training_runs import make_model, write_training_on


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

    return partial(write_training_on, model)


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
