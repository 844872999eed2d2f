"""Runs of training in tests, and what is compared of them."""

import json
from pathlib import Path

import msgspec
import torch
from click.testing import CliRunner
from seer_cli import main
from seer_rl import Response, rewards
from seer_rl.config import load_training
from seer_rl.training_run import train

from tests.support.eventually import PATIENCE_S

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
SPEEDS = {
    "tokens_per_s",
    "tail_s",
    "chunks",
    "preemptions",
    "instances_lost",
    "resumed_tokens",
    "acceptance_length",
    "environment_s",
}
BASELINE = ("seer.plugins=['group_round_robin']",)
WAIT_FOR = """
    if response.metadata["index"] >= {held_out}:
        while not (HERE / "{file}").exists():
            time.sleep(0.02)
    return float(response.token_ids[0] % 2)"""


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


def write_training_on(model, folder, reward="return float(response.token_ids[0] % 2)"):
    """Write a config with its task and model into a folder, and return its path."""
    (folder / "model").symlink_to(model)
    source = TASK.read_text("utf-8").replace("return 0.0  # the test's own", reward)
    (folder / "toy_task.py").write_text(source, "utf-8")
    (folder / "train.toml").write_text(CONFIG, "utf-8")
    return folder / "train.toml"


def limit_only(monkeypatch, hangs):
    """Give responses that do not hang all the time that a busy machine may take for their rewards."""
    ask = rewards._Worker.ask

    def ask_patiently(worker, line, limit_s):
        response = msgspec.json.decode(line, type=Response)
        return ask(worker, line, limit_s if hangs(response) else PATIENCE_S)

    monkeypatch.setattr(rewards._Worker, "ask", ask_patiently)


class RecordingListener:
    """Keeps what it receives, and calls a function at one phase."""

    def __init__(self, at=None, do=None):
        self.at, self.do = at, do
        self.lines, self.phases = [], []

    def phase(self, iteration, name):
        self.phases.append((iteration, name))
        if (iteration, name) == self.at:
            self.do()

    def responses(self, finished, wanted):
        assert finished <= wanted

    def iterated(self, metrics):
        self.lines.append(metrics)


def run(path, out, *overrides, resume=False, listener=None):
    listener = listener or RecordingListener()
    train(*load_training(path, overrides), out, listener, resume=resume)
    return listener.lines


def reproducible(lines):
    """Return the metrics that must not depend on scheduling."""
    return [
        {key: value for key, value in line.items() if key not in SPEEDS and not key.endswith("_s")}
        for line in lines
    ]


def read_metrics(out):
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]


def fail():
    raise OSError("interrupted")


def seer_train(path, out, *overrides, resume=False):
    """Run the command; an override that begins with a dash is an option of its own."""
    sets = ([each] if each.startswith("-") else ["--set", each] for each in overrides)
    options = [part for each in sets for part in each]
    arguments = ["train", str(path), "--out", str(out), *options, *(["--resume"] if resume else [])]
    return CliRunner().invoke(main, arguments)
