"""Models of all families: updates that equal starts, and ways to roll out that do as the matrix says."""

import asyncio

import pytest

pytest.register_assert_rewrite("backends.tests.families")

from seer_testing.families import FAMILIES  # noqa: E402

from backends.tests.families import expect_updates_to_equal_starts  # noqa: E402
from bench import render  # noqa: E402
from bench.models import TRAINED, WAYS, FamilyRun  # noqa: E402

pytestmark = pytest.mark.engine

AT_ONCE = ("Qwen3-MoE", "gpt-oss", "Qwen3, eight bits")
"""Experts, sinks, quantised layers; test_vllm_weights.py has a plain Qwen3 and one with a tied head."""
ELSEWHERE = {
    "DeepSeek-V3": "latent attention (MLA) of a CPU differs between batches",
    "Nemotron-H": "the Mamba-2 mixer of this vLLM fails on a CPU (IndexError)",
    "Falcon-H1": "the same",
}
"""Families of which no update can be compared here, and why; kernels of mxfp4 and fp8 need a GPU, or AMX."""


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(each, marks=[] if each in AT_ONCE else [pytest.mark.long])
        for each in FAMILIES
        if each not in ELSEWHERE
    ],
)
def test_an_update_and_the_way_back_answer_as_engines_that_start_on_the_weights(
    start, tmp_path, prompts, name
):
    expect_updates_to_equal_starts(start, tmp_path, prompts(6), name)


def outcomes(row):
    """Return what became of each way; how many responses differ is of no account."""
    return {way: "differ" if row[way].endswith("differ") else row[way] for way in WAYS}


@pytest.mark.long
@pytest.mark.parametrize("name", TRAINED)
def test_a_family_rolls_out_as_the_matrix_says(tmp_path, name):
    rows = {
        (row["engine"], row.get("runner", "first"), row["family"]): row
        for row in render.results()["models"].rows
    }
    found = asyncio.run(FamilyRun("vllm", name, tmp_path).row())
    assert outcomes(found) == outcomes(rows["vllm", "first", name])
