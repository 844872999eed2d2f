"""Each field that vLLM and SGLang have is decided on: whether it holds over the chunks of a response."""

from __future__ import annotations

import ast
import asyncio
import re
from functools import partial
from pathlib import Path

import pytest
from seer_remote.fields import SGLANG, SGLANG_SAMPLING, VLLM, VLLM_SAMPLING, divided
from test_remote_requests import PROMPTS, divide, sent

OF_VLLM_ITSELF = {"output_text_buffer_length"}
OF_SGLANG_ITSELF = {
    "stop_strs",
    "stop_regex_strs",
    "stop_str_max_len",
    "stop_regex_max_len",
    "is_normalized",
    "ebnf_full_assistant",
}
OF_VLLM_0_24 = """
n presence_penalty frequency_penalty repetition_penalty temperature top_p top_k min_p seed stop stop_token_ids
ignore_eos max_tokens min_tokens logprobs prompt_logprobs logprob_token_ids flat_logprobs detokenize
skip_special_tokens spaces_between_special_tokens include_stop_str_in_output output_kind skip_clone
structured_outputs logit_bias allowed_token_ids extra_args routed_experts_prompt_start bad_words
skip_reading_prefix_cache thinking_token_budget repetition_detection
"""
"""Those of the version that verl 0.9.1 pins, as its wheel has them."""

ROOT = Path(__file__).parents[3]


def fields(environment, path, name):
    """Return the annotated names of a class, read and not imported."""
    [place] = ROOT.glob(f"{environment}/lib/python3*/site-packages/{path}")
    body = ast.parse(place.read_text("utf-8")).body
    [found] = [each for each in body if isinstance(each, ast.ClassDef) and each.name == name]
    names = {each.target.id for each in found.body if isinstance(each, ast.AnnAssign)}
    return {each for each in names if not each.startswith("_")}


def test_each_of_vllm_s_sampling_parameters_is_decided_on():
    theirs = fields(".venv", "vllm/sampling_params.py", "SamplingParams")
    assert set(VLLM_SAMPLING) == theirs - OF_VLLM_ITSELF
    assert set(OF_VLLM_0_24.split()) <= set(VLLM_SAMPLING)


def test_each_field_of_vllm_s_requests_for_tokens_is_decided_on():
    entrypoints = "vllm/entrypoints"
    tokens = fields(".venv", f"{entrypoints}/scale_out/token_in_token_out/protocol.py", "GenerateRequest")
    completions = fields(".venv", f"{entrypoints}/openai/completion/protocol.py", "CompletionRequest")
    assert tokens <= set(VLLM) <= tokens | completions


def test_each_of_sglang_s_sampling_parameters_is_decided_on():
    sglang = partial(fields, ".venv-sglang")
    theirs = sglang("sglang/srt/sampling/sampling_params.py", "SamplingParams")
    assert set(SGLANG_SAMPLING) == theirs - OF_SGLANG_ITSELF
    assert set(SGLANG) <= sglang("sglang/srt/managers/io_struct.py", "GenerateReqInput")


@pytest.mark.parametrize("name", ["thinking_token_budget", "one_of_tomorrow"])
def test_a_response_under_a_field_that_holds_within_one_request_is_not_divided(fake, fleet_of, name):
    server = fake()
    prompt = PROMPTS[0] | {"n": 1, "attachments": {"sampling_params": {name: 5}}}
    result = asyncio.run(divide(fleet_of(server), [prompt, PROMPTS[1] | {"n": 1}]))
    assert [len(each.chunks) for each in result.completions] == [1, 4]
    [request] = [each for each in sent(server) if name in each["sampling_params"]]
    assert request["sampling_params"][name] == 5


def test_a_response_to_an_image_is_not_divided_on_sglang_which_makes_tokens_of_its_text_again():
    names = divided(SGLANG, SGLANG_SAMPLING)
    assert not {"image_data", "video_data", "audio_data"} & set(names)
    assert "lora_path" in names


def test_one_of_the_user_s_that_holds_over_chunks_is_named_in_the_settings(fake, fleet_of):
    server = fake()
    prompt = PROMPTS[0] | {"n": 1, "attachments": {"sampling_params": {"extra_args": {"mine": 1}}}}
    fleet = fleet_of(server, divided_attachments=("sampling_params.extra_args",))
    [completion] = asyncio.run(divide(fleet, [prompt])).completions
    assert len(completion.chunks) == 4


def test_the_page_about_sampling_says_of_each_parameter_what_becomes_of_it():
    page = (ROOT / "docs/guides/sampling.md").read_text("utf-8")
    rows = page.partition("| what Seer does |")[2].partition("\n\n")[0].splitlines()[2:]
    for column, table in ((2, VLLM_SAMPLING), (3, SGLANG_SAMPLING)):
        said = [re.findall(r"`(\w+)`", row.split("|")[column]) for row in rows]
        ways = ("chunks", "translated", "whole", "seer", "refused")
        assert said == [sorted(name for name, its in table.items() if its == way) for way in ways]
