"""An update makes an engine of any family one that was started on the weights, and so does the way back."""

import pytest

pytest.register_assert_rewrite("backends.tests.families")

from backends.tests.families import FAMILIES, expect_updates_to_equal_starts  # noqa: E402

pytestmark = pytest.mark.engine

AT_ONCE = ("gemma3", "qwen3 with experts", "gpt-oss", "qwen3, eight bits")
"""A tied head, experts, sinks, quantised layers; test_vllm_weights.py has a plain Qwen3."""
ELSEWHERE = {
    "deepseek_v3, glm4_moe_lite, kimi": "latent attention (MLA) of a CPU differs between batches",
    "nemotron_h, falcon_h1, mamba2": "the Mamba-2 mixer of this vLLM fails on a CPU (IndexError)",
    "qwen3_5, qwen2_vl, qwen2_5_vl, qwen3_vl": "images need torchvision, which is a stub here",
    "gpt-oss as released, fp8": "kernels of mxfp4 and fp8 need a GPU, or a CPU with AMX",
}
"""Families that are not tested here, and why."""


@pytest.mark.parametrize(
    "name", [pytest.param(each, marks=[] if each in AT_ONCE else [pytest.mark.long]) for each in FAMILIES]
)
def test_an_update_and_the_way_back_answer_as_engines_that_start_on_the_weights(
    start, tmp_path, prompts, name
):
    expect_updates_to_equal_starts(start, tmp_path, prompts(6), name)
