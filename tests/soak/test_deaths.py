"""A run that dies again and again ends with the tokens of one that never did.

`pytest tests/soak/test_deaths.py -k model --soak-minutes 30 -s` runs a long campaign over engines without a
model, `pytest -m engine tests/soak/test_deaths.py --soak-minutes 30 -s` one on vLLM.
"""

import importlib
import json
import random
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from .campaign import KINDS, Campaign, run_campaign

ROOT = Path(__file__).parents[2]
EXAMPLE = ROOT / "examples/tiny_reasoner"
CONFIG = """
[seer]
plugins = ["divided_rollout"]
engine = "no_model"
[rollout]
n = 8
max_tokens = 600
[engine.no_model]
token_s = 0.005
[plugin.divided_rollout]
chunk_tokens = 16
"""

TRAINING = """
[train]
prompts = "toy_task.py:prompts"
reward = "toy_task.py:reward"
iterations = 4
groups = 4
model = "model"
max_dlogp = 0.0  # the engine makes its log-probs up
[train.rewards]
workers = 2
[train.torch]
micro_tokens = 512
[seer]
plugins = ["divided_rollout"]
engine = "no_model"
[engine.no_model]
token_s = 0.02
[plugin.divided_rollout]
chunk_tokens = 8
[rollout]
n = 4
max_tokens = 120
"""
CHILDLESS = [kind for kind in KINDS if kind != "child"]
"""For engines that have no process of their own."""


def responses_in(out):
    """Return tokens, log-probs and finish reason of each response that a run has written."""
    found = {}
    for line in (out / "completions.jsonl").read_bytes().splitlines():
        response = json.loads(line)
        assert response["request_id"] not in found
        found[response["request_id"]] = response["token_ids"], response["logprobs"], response["finish_reason"]
    return found


def undisturbed(arguments, out):
    """Run a command without a death."""
    command = [sys.executable, "-c", "from seer_main import main; main()", *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr


def test_a_run_over_engines_without_a_model_dies_and_loses_nothing(no_model, tmp_path, soak):
    (tmp_path / "seer.toml").write_text(CONFIG)
    lines = ({"prompt_token_ids": [5, each], "group_id": str(each)} for each in range(8))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["run", str(tmp_path / "seer.toml"), "--prompts", str(tmp_path / "prompts.jsonl")]
    undisturbed(arguments, tmp_path / "undisturbed")
    expected = responses_in(tmp_path / "undisturbed")
    chance = random.Random(soak.seed)

    def make(folder):
        life_bytes = 20_000 if soak.full else 100_000
        return Campaign(arguments, folder, chance, responses_in, CHILDLESS, life_bytes=life_bytes)

    deaths, lives, found = run_campaign(make, tmp_path, soak.minutes, 6)
    print(f"{deaths.total()} deaths in {lives} lives of {len(found)} runs: {dict(deaths)}")
    assert all(each == expected for each in found)


def learned(training_runs, out):
    """Return what every iteration has logged that does not depend on scheduling, and the weights."""
    weights = [path.read_bytes() for path in sorted((out / "checkpoints").glob("*/*.safetensors"))]
    return training_runs.reproducible(training_runs.read_metrics(out)), weights[-1]


@pytest.mark.long
def test_training_over_engines_without_a_model_dies_and_learns_the_same(
    no_model, tmp_path, soak, monkeypatch
):
    monkeypatch.syspath_prepend(str(ROOT / "training/rl/tests"))
    training_runs = importlib.import_module("training_runs")
    training_runs.make_model(tmp_path / "model", 1000)
    task = (ROOT / "training/rl/tests/toy_task.py").read_text("utf-8")
    task = task.replace('"prompt": f"{seed} {index}"', '"prompt_token_ids": [5, 6 + index]')
    task = task.replace("return 0.0  # the test's own", "return float(response.token_ids[0] % 2)")
    (tmp_path / "toy_task.py").write_text(task)
    (tmp_path / "train.toml").write_text(TRAINING)
    arguments = ["train", str(tmp_path / "train.toml")]
    undisturbed(arguments, tmp_path / "undisturbed")
    read = partial(learned, training_runs)
    expected = read(tmp_path / "undisturbed")
    chance = random.Random(soak.seed)

    def make(folder):
        return Campaign(arguments, folder, chance, read, life_bytes=10**9, life_s=15 if soak.full else 8)

    deaths, lives, found = run_campaign(make, tmp_path, soak.minutes, 1)
    print(f"{deaths.total()} deaths in {lives} lives of {len(found)} trainings: {dict(deaths)}")
    assert all(each == expected for each in found)


@pytest.mark.long
@pytest.mark.engine
def test_a_run_on_vllm_dies_and_loses_nothing(tmp_path, soak):
    pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")
    prompts = tmp_path / "prompts.jsonl"
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[: 8 if soak.full else 4]))
    arguments = ["run", str(EXAMPLE / "demo.toml"), "--prompts", str(prompts)]
    arguments += [word for each in soak.overrides for word in ("--set", each)]
    undisturbed(arguments, tmp_path / "undisturbed")
    expected = responses_in(tmp_path / "undisturbed")
    chance = random.Random(soak.seed)

    def make(folder):
        kinds, life_bytes = (KINDS, 200_000) if soak.full else (["SIGKILL"], 100_000)
        return Campaign(arguments, folder, chance, responses_in, kinds, life_bytes=life_bytes)

    deaths, lives, found = run_campaign(make, tmp_path, soak.minutes, 1)
    print(f"{deaths.total()} deaths in {lives} lives of {len(found)} runs: {dict(deaths)}")
    assert all(_without_logprobs(each) == _without_logprobs(expected) for each in found)


def _without_logprobs(responses):
    """Batches differ, and rounding with them: the last bits of log-probs are those of the batch."""
    return {name: (tokens, reason) for name, (tokens, _, reason) in responses.items()}
