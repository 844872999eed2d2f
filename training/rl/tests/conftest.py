"""A model small enough to train in a test, and a run of training on simulated engines."""

import sys
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent))  # tests import training_runs

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


def make_model(folder, vocab_size):
    """Write a model with tied weights that is not trained."""
    from transformers import Qwen3Config, Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=vocab_size,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=256,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)
    (folder / "tokenizer.json").write_text("{}")
    return folder


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
