"""Quantised models: tokens however they are made, and updates by plain weights and by adapters."""

import json

import pytest
from seer_testing.families import VOCABULARY

from backends.tests.peft_files import adapter_of, merged, save
from backends.vllm.tests.test_vllm_adapters import scores, update
from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_core.ports.weights import directory

pytestmark = pytest.mark.engine

GREEDY, DRAWN = Sampling(0.0, ignore_eos=True), Sampling(1.0, ignore_eos=True)
BLOCK = 32
TOKENS = 130


def test_tokens_are_the_same_whole_alone_in_chunks_moved_through_a_pool_and_drafted(
    start, models, make_pool, notes, prompts, moved
):
    pool, form = make_pool(32 << 20), "fp8_per_channel"
    settings = {"dtype": "bfloat16", "engine_args": {"quantization": form}}
    source = SourceSpec(
        "draft_sources:Scripted", {"notes": str(notes)}, 5, StepTimes((1,), (0,), ((0.001,),))
    )
    a = start(models[0], kv_pool=pool, **settings)
    b = start(models[0], source, pool, 1, **settings)
    assert a.info.quantization == b.info.quantization == form
    asked = [[token % VOCABULARY for token in prompt] for prompt in prompts(5, 70)]
    for sampling in (GREEDY, DRAWN):
        b.group = "nothing"
        expected = a.whole(asked, sampling, TOKENS)
        assert a.alone(asked, sampling, TOKENS) == b.whole(asked, sampling, TOKENS) == expected
        assert a.divided(asked, sampling, TOKENS, 17) == expected
        a.run(pool.clear())
        (notes / "answers.json").write_text(json.dumps(expected, default=list))
        b.group = "mixed"
        responses, rounds = moved((a, b), asked, sampling, TOKENS, 40)
        assert responses == expected
        assert min(output.pool_tokens for outputs in rounds[1:] for output in outputs) >= 2 * BLOCK
        assert any(sum(output.accepted_at) for outputs in rounds for output in outputs)
    for each in (a, b):
        each.run(each.engine.stop())
        each.used_up = True


def test_a_model_that_vllm_quantises_takes_plain_weights_and_adapters_and_is_called_quantised(
    start, models, prompts, tmp_path
):
    settings = {"dtype": "bfloat16", "engine_args": {"quantization": "fp8_per_channel"}}
    asked, tensors = prompts(3), adapter_of(models[1], 4)
    updated, fresh = start(models[0], **settings), start(models[1], **settings)
    assert updated.info.quantization == fresh.info.quantization == "fp8_per_channel"
    named = {"dtype": "bfloat16", "engine_args": {"quantization": "int8_per_channel_weight_only"}}
    assert start(models[0], **named).info.quantization == ""  # vLLM leaves dense layers as they are
    update(updated, directory(models[1]))
    tokens, logprobs = scores(updated, asked, 20)
    expected = scores(fresh, asked, 20)
    assert tokens == expected[0]
    assert (logprobs == expected[1]).all()
    update(updated, merged(tmp_path / "merged", models[1], tensors))
    update(fresh, save(tmp_path / "adapter", tensors))
    found = scores(fresh, asked, 20)
    assert found[0] == scores(updated, asked, 20)[0] != tokens
    for each in (updated, fresh):
        each.run(each.engine.stop())
        each.used_up = True
