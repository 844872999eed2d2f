"""Models that vLLM quantises as it loads them: updates by plain weights and by adapters."""

import pytest

from backends.tests.peft_files import adapter_of, merged, save
from backends.vllm.tests.test_vllm_adapters import scores, update
from seer_core.ports.weights import directory

pytestmark = pytest.mark.engine


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
