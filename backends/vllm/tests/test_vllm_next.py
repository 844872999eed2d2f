"""The next vLLM, of which there is no build for CPUs yet, has every name and writes the same tokens.

Its Python files lie over the binaries of the vLLM installed here (``scripts/setup-next-vllm``).
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from seer_core.model import Sampling
from seer_core.ports.weights import directory

pytestmark = pytest.mark.engine

ROOT = Path(__file__).parents[3]
OVERLAY = ROOT / "build" / "next-vllm"
SAMPLINGS = Sampling(0.0), Sampling(1.0), Sampling(0.8, top_p=0.9, top_k=20)
NAMES = """
import vllm
from seer_vllm import internals
from seer_worker.process.names import flaw_of

assert vllm.__version__.startswith({version!r}), vllm.__version__
internals.check_imports(on_cpu=True)
names = (*internals.SECOND_IMPORTED, *internals.PRELOADED)
assert not [flaw for name in names if (flaw := flaw_of(name))]
"""


@pytest.fixture(scope="module")
def version():
    """The version that is laid over."""
    if not OVERLAY.exists():
        pytest.skip("there is no build/next-vllm; run scripts/setup-next-vllm")
    wanted = (ROOT / "requirements" / "next-vllm.txt").read_text()
    return wanted.strip().removeprefix("vllm==")


@pytest.fixture
def overlaid(monkeypatch, version):
    """Let workers that are started now import the next vLLM."""
    monkeypatch.setenv("PYTHONPATH", str(OVERLAY), os.pathsep)


def test_no_name_is_missed(version):
    done = subprocess.run(
        [sys.executable, "-c", NAMES.format(version=version)],
        env={**os.environ, "PYTHONPATH": str(OVERLAY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def expect_the_same(harness, roomy, version, prompts, tokens):
    """Compare responses, whole and divided, with those of the vLLM installed here."""
    assert f" vllm={version}\n" in Path(harness.engine.log).read_text()
    for sampling in SAMPLINGS:
        expected = roomy.whole(prompts(4), sampling, tokens)
        assert harness.whole(prompts(4), sampling, tokens) == expected
        assert harness.divided(prompts(4), sampling, tokens, chunk_tokens=tokens // 3) == expected


def test_its_first_runner_writes_the_same_and_takes_weights_and_sleeps(
    overlaid, version, start, roomy, newer, models, prompts
):
    harness = start(models[0])
    expect_the_same(harness, roomy, version, prompts, 60)
    harness.run(harness.engine.sleep())
    harness.run(harness.engine.wake())
    harness.weight_version += 1
    harness.run(harness.engine.update_weights(directory(models[1]), harness.weight_version))
    expected = newer.whole(prompts(2), SAMPLINGS[1], 40)
    assert harness.whole(prompts(2), SAMPLINGS[1], 40) == expected
    harness.run(harness.engine.stop())


@pytest.mark.long
@pytest.mark.parametrize("instance", ["", "planning_ahead:Ahead"], ids=["step by step", "planned ahead"])
def test_its_second_runner_writes_the_same(overlaid, version, start_second, roomy, models, prompts, instance):
    harness = start_second(models[0], instance=instance)
    expect_the_same(harness, roomy, version, prompts, 24)
    harness.run(harness.engine.stop())
