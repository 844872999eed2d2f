"""Training on real engines, in several ranks beside sleeping ones."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.installed import skip_without

ROOT = Path(__file__).parents[2]
TINY_RL = ROOT / "examples" / "tiny_rl" / "train.toml"

pytestmark = pytest.mark.engine
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")


@pytest.mark.long
def test_megatron_in_two_ranks_beside_sleeping_engines_trains_the_weights_of_one_process(tmp_path):
    one = trained(tmp_path / "torch", "train.iterations=1")
    two = trained(
        tmp_path / "megatron",
        "train.iterations=2",
        "train.trainer=megatron",
        "train.megatron.tensor_parallel=2",
        "train.colocated=true",
    )
    same = ("rewards_sha256", "tokens_sha256", "engine_logprobs_sha256", "trained_tokens")
    assert {name: two[0][name] for name in same} == {name: one[0][name] for name in same}
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], rel=1e-5, abs=1e-7)
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)
    assert len({row["weights_sha256"] for row in two}) == len({row["tokens_sha256"] for row in two}) == 2
    assert all(0 < row["dlogp_mean"] < 1e-6 and row["grad_norm"] > 0 for row in two)


def trained(out, *overrides):
    """Train the example, a smaller one, and return its metrics."""
    small = ("train.groups=6", "train.evaluation.groups=2", "engine.vllm.instances=1", *overrides)
    options = [part for override in small for part in ("--set", override)]
    done = subprocess.run(
        [Path(sys.executable).with_name("seer"), "train", TINY_RL, "--out", out, *options],
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (out / "metrics.jsonl").read_text("utf-8").splitlines()]
