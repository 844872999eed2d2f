"""A real vLLM under every sampling control, which holds however the work is cut."""

import json
import os
import re
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest
from msgspec import structs
from seer_vllm.plugin import vllm_environment

from seer_core import Session
from seer_core.model import Sampling, StructuredOutputs
from seer_core.plugins.config import make_config

pytestmark = pytest.mark.engine

EOS, TOKENS = 2, 60


def joined(response):
    return "".join(f"w{token}" for token in response if token > 2)


def text_of(response):
    return " ".join(f"w{token}" for token in response if token > 2)


def test_whole_divided_and_alone_give_the_same_tokens(roomy, prompts, controlled):
    some, tokens = prompts(4), 45
    whole = roomy.whole(some, controlled, tokens)
    assert roomy.divided(some, controlled, tokens, chunk_tokens=11) == whole
    assert roomy.alone(some, controlled, tokens) == whole
    plain = Sampling(controlled.temperature, controlled.top_p, controlled.top_k)
    assert roomy.whole(some, plain, tokens) != whole


def test_a_response_ends_with_the_first_token_that_completes_a_stop_string(roomy, prompts):
    stops = ("3 w4", " w99 ", "w50")
    free = roomy.whole(prompts(12), Sampling(1.0), TOKENS)
    held = roomy.whole(prompts(12), Sampling(1.0, stop=stops), TOKENS)
    assert held != free
    for whole, response in zip(free, held, strict=True):
        assert whole[: len(response)] == response
        before, text = text_of(response[:-1]), text_of(response)
        assert not any(stop in before for stop in stops)
        ended = response[-1] == EOS or len(response) == TOKENS
        assert ended or any(stop in text for stop in stops)


def test_min_tokens_hold_off_every_end(roomy, prompts):
    ends = Sampling(1.0, logit_bias={EOS: 9.0}, stop_token_ids=(17,), stop=("w3",))
    short = roomy.whole(prompts(8), ends, TOKENS)
    long = roomy.whole(prompts(8), structs.replace(ends, min_tokens=25), TOKENS)
    assert max(map(len, short)) <= 25 <= min(map(len, long))
    assert not any({EOS, 17} & set(response[:25]) for response in long)


def test_only_allowed_tokens_are_written_and_no_bad_words(roomy, prompts):
    some = Sampling(1.0, allowed_token_ids=(3, 4, 5, 6), bad_words=((3, 4), (5,)))
    for response in roomy.whole(prompts(6), some, TOKENS):
        assert set(response) <= {3, 4, 6}
        assert (3, 4) not in pairwise(response)


def test_a_response_has_the_form_that_was_asked_for(roomy, prompts):
    pattern, choices = re.compile("(w1[0-9]w[2-5]){2,6}"), ("w5w6w7", "w10w11", "w9")
    matching = Sampling(1.0, structured_outputs=StructuredOutputs(regex=pattern.pattern))
    for response in roomy.whole(prompts(8), matching, TOKENS):
        assert pattern.fullmatch(joined(response))
        assert response[-1] == EOS
    chosen = Sampling(1.0, structured_outputs=StructuredOutputs(choice=choices))
    found = {joined(response) for response in roomy.whole(prompts(16), chosen, TOKENS)}
    assert found <= set(choices)
    assert len(found) > 1
    blind = Sampling(1.0, structured_outputs=StructuredOutputs(choice=("w50w51",)), logit_bias={5: 20.0})
    for response in roomy.whole(prompts(4), blind, TOKENS):
        assert response == [5, EOS]  # no token begins with 0: behind w5 none goes on


def test_log_probs_stay_the_model_s_own_under_every_mask(roomy, prompts):
    [prompt] = prompts(1)
    matching = Sampling(1.0, structured_outputs=StructuredOutputs(regex="w17w18"))
    [output] = roomy.run(roomy.chunks([roomy.job(prompt, 8, 3, matching)]))
    assert output.token_ids == [17, 18, EOS]
    assert max(output.logprobs) < -0.5  # under the mask it would be 0: there is one token
    [plain] = roomy.run(roomy.chunks([roomy.job(prompt, 1, 3, Sampling(0.0, allowed_token_ids=(17,)))]))
    assert plain.logprobs == pytest.approx(output.logprobs[:1], abs=1e-4)


def test_a_grammar_that_is_none_fails_its_own_chunk_alone(roomy, prompts):
    [prompt] = prompts(1)
    broken = Sampling(1.0, structured_outputs=StructuredOutputs(regex="(w1"))
    bad, good = roomy.job(prompt, 8, 3, broken), roomy.job(prompt, 8, 3, Sampling(1.0))
    roomy.engine.submit(bad)
    roomy.run(roomy.chunks([good]))
    roomy.run(roomy.until(lambda: bad.id in roomy.failures))
    assert "structured_outputs is no grammar" in roomy.failures[bad.id]


def test_eos_does_not_end_a_response_that_ignores_it(roomy, prompts):
    eager = Sampling(1.0, logit_bias={EOS: 5.0})
    assert min(map(len, roomy.whole(prompts(6), eager, TOKENS))) < TOKENS
    responses = roomy.whole(prompts(6), structs.replace(eager, ignore_eos=True), TOKENS)
    assert {len(response) for response in responses} == {TOKENS}
    assert any(EOS in response[:-1] for response in responses)


def test_a_streamed_chunk_has_no_token_behind_its_stop(roomy, prompts):
    jobs = [roomy.job(prompt, TOKENS, 5, Sampling(1.0, stop=("3 w4", "w50"))) for prompt in prompts(8)]
    outputs = roomy.run(roomy.chunks([structs.replace(job, streams=True) for job in jobs]))
    for job, output in zip(jobs, outputs, strict=True):
        assert len(roomy.streamed(job)[0]) <= len(output.token_ids)
        assert output.steps == len(output.token_ids)


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
    SamplingParams(max_tokens=40, logit_bias=bias or None, **fields)
    for bias, (fields, _) in zip(bias, asked, strict=True)
]
found = [each.outputs[0] for each in llm.generate(prompts, params, use_tqdm=False)]
answers = [[list(each.token_ids), each.text, each.stop_reason] for each in found]
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


def test_tokens_texts_and_ends_are_those_of_vllm_itself(models, prompts):
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
        {"prompt_token_ids": prompt, "n": 1, "max_tokens": 40, "group_id": str(number), **fields}
        for number, (fields, prompt) in enumerate(asked)
    ]
    with Session(make_config(config, (), base_dir=Path(), origin="a test")) as session:
        found = {each.group_id: each for each in session.rollout(records).completions}
    whole = [found[record["group_id"]] for record in records]
    ours = [[each.token_ids.tolist(), each.text, each.stop_reason] for each in whole]
    assert ours == theirs
    assert len({str(each) for each in ours}) > 30
    assert {type(reason) for _, _, reason in ours} == {type(None), int, str}
