"""A real vLLM under every sampling control, which holds however the work is cut; and vLLM's own answers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from seer_host.config_files import make_config
from seer_session import Session
from seer_vllm.plugin import vllm_environment

pytest.register_assert_rewrite("backends.tests.sampling_controls")

from backends.tests.sampling_controls import SamplingControls  # noqa: E402

pytestmark = pytest.mark.engine


class TestVllmControls(SamplingControls):
    """vLLM has all of them."""


STOCK = """
import json, sys
from vllm import LLM, SamplingParams
from vllm.sampling_params import StructuredOutputsParams

model, asked = json.load(sys.stdin)
llm = LLM(model, dtype="float32", enforce_eager=True, max_model_len=256, kv_cache_memory_bytes=1 << 26)
prompts = [{"prompt_token_ids": prompt} for _, prompt in asked]
bias = [{int(token): bias for token, bias in fields.pop("logit_bias", {}).items()} for fields, _ in asked]
for fields, _ in asked:
    if form := fields.get("structured_outputs"):
        fields["structured_outputs"] = StructuredOutputsParams(**form)
params = [
    SamplingParams(max_tokens=40, logit_bias=bias or None, logprobs=3, prompt_logprobs=2, **fields)
    for bias, (fields, _) in zip(bias, asked, strict=True)
]
def scores(places):
    return [[(token, each.logprob) for token, each in (place or {}).items()] for place in places]

found = llm.generate(prompts, params, use_tqdm=False)
answers = [
    [list(each.token_ids), each.text, each.stop_reason, scores(each.logprobs), scores(whole.prompt_logprobs)]
    for whole in found
    for each in whole.outputs
]
print("ANSWERS", json.dumps(answers))
"""

GREEDY = (
    {},
    {"repetition_penalty": 1.4},
    {"presence_penalty": 1.5, "frequency_penalty": 0.7},
    {"frequency_penalty": -1.0},
    {"logit_bias": {"5": 6.0, "9": -100.0}},
    {"allowed_token_ids": list(range(3, 40))},
    {"bad_words": ["w5 w6", "w17", "w40"]},
    {"structured_outputs": {"regex": "(w1[0-9]w[2-5]){2,6}"}},
    {"structured_outputs": {"choice": ["w5w6w7", "w10w11", "w9"]}, "repetition_penalty": 1.3},
    {"stop_token_ids": [17, 50, 60, 61, 62, 63]},
    {"stop": ["3 w4", "w99", "0 w2", "w50"]},
    {"stop": ["1 w", "7 w"], "include_stop_str_in_output": True, "min_tokens": 9},
    {"repetition_penalty": 1.2, "logit_bias": {"2": 4.0}, "min_tokens": 11, "stop": ["5 "]},
)
"""Fields of vLLM's, at temperature 0."""


def expect_same_scores(token_ids, logprobs, tops, theirs):
    """Compare with vLLM's own: in each place the token's log-prob, and those of the most probable ones."""
    ours = [
        {token: logprob, **dict(top)} for token, logprob, top in zip(token_ids, logprobs, tops, strict=True)
    ]
    assert [place[0][0] for place in theirs] == list(token_ids)
    assert [dict(place) for place in theirs] == [pytest.approx(each, abs=2e-5) for each in ours]


def test_tokens_texts_ends_and_log_probs_are_those_of_vllm_itself(models, prompts):
    asked = [({"temperature": 0.0, **fields}, prompt) for fields in GREEDY for prompt in prompts(4)]
    stock = subprocess.run(
        [sys.executable, "-c", STOCK],
        input=json.dumps([str(models[0]), asked]),
        capture_output=True,
        text=True,
        env=vllm_environment(os.environ, 1, ()),
        timeout=240,
    )
    assert stock.returncode == 0, stock.stderr[-3000:]
    theirs = json.loads(stock.stdout.partition("ANSWERS ")[2])
    config = {
        "seer": {"engine": "vllm", "plugins": ["divided_rollout"]},
        "plugin": {"divided_rollout": {"chunk_tokens": 16}},
        "engine": {
            "vllm": {
                "model": str(models[0]),
                "dtype": "float32",
                "kv_cache_bytes": 1 << 26,
                "max_model_tokens": 256,
            }
        },
    }
    records = [
        {
            "prompt_token_ids": prompt,
            "n": 1,
            "max_tokens": 40,
            "group_id": str(number),
            "top_logprobs": 3,
            "prompt_logprobs": 2,
            **fields,
        }
        for number, (fields, prompt) in enumerate(asked)
    ]
    with Session(make_config(config, (), base_dir=Path(), origin="a test")) as session:
        found = {each.group_id: each for each in session.rollout(records).completions}
    whole = [found[record["group_id"]] for record in records]
    ours = [[each.token_ids.tolist(), each.text, each.stop_reason] for each in whole]
    assert ours == [answer[:3] for answer in theirs]
    for each, (_, _, _, scores, of_prompt) in zip(whole, theirs, strict=True):
        fields, prompt_token_ids = asked[int(each.group_id)]
        if "structured_outputs" not in fields:  # vLLM's own are of what its mask leaves
            expect_same_scores(each.token_ids, each.logprobs, each.top_logprobs, scores)
        prompt, first = each.prompt_logprobs, of_prompt.pop(0)
        assert first == []
        expect_same_scores(prompt_token_ids[1:], prompt.logprobs, prompt.top_logprobs, of_prompt)
    assert len({str(each) for each in ours}) > 30
    assert {type(reason) for _, _, reason in ours} == {type(None), int, str}
