"""Models of all families: updates that equal starts, and ways to roll out that do as the matrix says."""

import os

import pytest

pytest.register_assert_rewrite("backends.tests.families", "backends.tests.matrix")

from seer_testing.families import FAMILIES  # noqa: E402

from backends.tests.families import expect_updates_to_equal_starts  # noqa: E402
from backends.tests.matrix import expect_the_matrix_to_say_so, rows_of  # noqa: E402
from bench.models import INTERPRETER  # noqa: E402

pytestmark = pytest.mark.engine

AT_ONCE = ("Qwen3-MoE", "gpt-oss", "Qwen3, eight bits")
"""Experts, sinks, quantised layers; test_vllm_weights.py has a plain Qwen3 and one with a tied head."""
ROW_AT_ONCE = ("first", "Qwen3-MoE")
"""The row of the matrix for which ``make test`` has the time; test_vllm_hybrids.py has windows and states."""
ELSEWHERE = {
    "DeepSeek-V3": "latent attention (MLA) of a CPU differs between batches",
    "Nemotron-H": "Mamba-2 is refused on a CPU",
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


@pytest.mark.parametrize(
    ("runner", "name"),
    [pytest.param(*row, marks=[] if row == ROW_AT_ONCE else [pytest.mark.long]) for row in rows_of("vllm")],
)
def test_a_family_rolls_out_as_the_matrix_says(monkeypatch, tmp_path, runner, name):
    if runner == "second":
        monkeypatch.setenv("PYTHONPATH", str(INTERPRETER), os.pathsep)
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    expect_the_matrix_to_say_so("vllm", runner, name, tmp_path)
