"""A run that dies again and again ends with the tokens of one that never did.

`pytest tests/soak/test_deaths.py -k model --soak-minutes 30 -s` runs a long campaign over engines without a
model, `pytest -m engine tests/soak/test_deaths.py --soak-minutes 30 -s` one on vLLM.
"""

import json
import random
import subprocess
import sys
from pathlib import Path

import pytest

from .deaths import KINDS, Campaign, responses_in, run_campaign

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


def undisturbed(arguments, out):
    """Run without a death, and return its responses."""
    command = [sys.executable, "-c", "from seer_main import main; main()", *arguments, "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr
    return responses_in(out)


def test_a_run_over_engines_without_a_model_dies_and_loses_nothing(no_model, tmp_path, soak):
    (tmp_path / "seer.toml").write_text(CONFIG)
    lines = ({"prompt_token_ids": [5, each], "group_id": str(each)} for each in range(8))
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    arguments = ["run", str(tmp_path / "seer.toml"), "--prompts", str(tmp_path / "prompts.jsonl")]
    expected = undisturbed(arguments, tmp_path / "undisturbed")
    chance = random.Random(soak.seed)

    def make(out):
        kinds = [kind for kind in KINDS if kind != "engine"]  # these engines have no process
        life_bytes = 20_000 if soak.full else 100_000
        return Campaign([*arguments, "--out", str(out)], out, chance, kinds, life_bytes)

    deaths, lives, found = run_campaign(make, tmp_path, soak.minutes, 6)
    print(f"{deaths.total()} deaths in {lives} lives of {len(found)} runs: {dict(deaths)}")
    assert all(each == expected for each in found)


@pytest.mark.engine
def test_a_run_on_vllm_dies_and_loses_nothing(tmp_path, soak):
    pytest.importorskip("vllm", reason="vLLM is not installed: `make setup` installs it")
    prompts = tmp_path / "prompts.jsonl"
    lines = (EXAMPLE / "prompts.jsonl").read_text().splitlines(keepends=True)
    prompts.write_text("".join(lines[:8]))
    arguments = ["run", str(EXAMPLE / "demo.toml"), "--prompts", str(prompts)]
    arguments += [word for each in soak.overrides for word in ("--set", each)]
    expected = undisturbed(arguments, tmp_path / "undisturbed")
    chance = random.Random(soak.seed)

    def make(out):
        kinds = KINDS if soak.full else ["SIGKILL"]
        return Campaign([*arguments, "--out", str(out)], out, chance, kinds, life_bytes=200_000)

    deaths, lives, found = run_campaign(make, tmp_path, soak.minutes, 1)
    print(f"{deaths.total()} deaths in {lives} lives of {len(found)} runs: {dict(deaths)}")
    assert all(_without_logprobs(each) == _without_logprobs(expected) for each in found)


def _without_logprobs(responses):
    """Batches differ, and rounding with them: the last bits of log-probs are those of the batch."""
    return {name: (tokens, reason) for name, (tokens, _, reason) in responses.items()}
