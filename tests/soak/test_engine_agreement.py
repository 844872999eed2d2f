"""vLLM and SGLang write the same responses for the same seeds; with --soak-minutes on 80 prompts."""

import asyncio
import subprocess
import sys

import msgspec
import pytest

from bench.harness import EXAMPLE, prompts
from tests.support.installed import skip_without

pytestmark = [pytest.mark.engine, pytest.mark.long]
skip_without("vllm", reason="vLLM is not installed: `make setup` installs it")

FULL_GROUPS = 80
FULL_PLUGINS = ("divided_rollout", "context_sched", "grouped_spec")
LEAST_EQUAL = 0.99
"""Share of responses: two candidates closer than rounding may change places."""


def fresh_prompts(path):
    task = [sys.executable, EXAMPLE / "task.py", "--groups", "320", "--n", "1", "--seed", "7", "--out", path]
    subprocess.run(task, check=True)
    return [msgspec.json.decode(line) for line in path.read_bytes().splitlines()[:FULL_GROUPS]]


def test_responses_are_the_same_on_both_engines(soak, tmp_path):
    from .engine_agreement import agreement

    records = fresh_prompts(tmp_path / "prompts.jsonl") if soak.full else [r | {"n": 1} for r in prompts(5)]
    plugins = FULL_PLUGINS if soak.full else ()
    for row in asyncio.run(agreement(("vllm", "sglang"), records, plugins, soak.overrides)):
        assert row["share_equal"] >= LEAST_EQUAL, row["differences"]
        assert row["largest_logprob_difference"] < 1e-3
