"""Models' sizes from their config.json, and what they cost on GPUs."""

import json

import pytest
from seer_sim.machines import GPUS, TYPICAL, cost_on, kv_tokens
from seer_sim.presets import PRESETS
from seer_sim.published import CONFIGS
from seer_sim.sizes import read_sizes, sizes_of

from seer_core.errors import ConfigError

DENSE = CONFIGS["Qwen/Qwen3-32B"]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen/Qwen3-32B", 32.0),
        ("openai/gpt-oss-120b", 116.2),
        ("MiniMaxAI/MiniMax-M2.5", 228.1),
        ("Qwen/Qwen3-235B-A22B-FP8", 234.5),
        ("deepseek-ai/DeepSeek-V3", 670.1),
        ("moonshotai/Kimi-K2.5", 1025.2),
    ],
)
def test_weights_add_up_to_those_of_the_model_card(name, billions):
    sizes = sizes_of(CONFIGS[name])
    assert (sizes.weights + sizes.expert_weights) / 1e9 == pytest.approx(billions, rel=0.002)


def test_kv_is_that_of_grouped_latent_and_sliding_attention():
    assert sizes_of(DENSE).kv_bytes_per_token == 64 * 2 * 8 * 128 * 2
    latent = sizes_of(CONFIGS["deepseek-ai/DeepSeek-V3"])
    assert latent.kv_bytes_per_token == 61 * 576 * 2
    assert latent.kv_heads == 1
    assert sizes_of(CONFIGS["openai/gpt-oss-120b"]).kv_bytes_per_token == 18 * 2 * 8 * 64 * 2
    hybrid = {**DENSE, "full_attention_interval": 4}
    assert sizes_of(hybrid).kv_bytes_per_token == sizes_of(DENSE).kv_bytes_per_token / 4


def test_bytes_follow_the_quantisation():
    plain, small = sizes_of(DENSE), sizes_of({**DENSE, "quantization_config": {"quant_method": "fp8"}})
    head = 151936 * 5120
    assert plain.weight_bytes == 2 * plain.weights
    assert small.weight_bytes == plain.weights - head + 2 * head
    assert (plain.precision, small.precision) == ("bf16", "fp8")
    experts = sizes_of(CONFIGS["moonshotai/Kimi-K2.5"])
    assert experts.expert_bytes == experts.expert_weights * 9 / 16
    assert experts.weight_bytes == 2 * experts.weights


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "hidden_size"),
        ({"hybrid_override_pattern": "M-M*"}, "Mamba layers are not modelled"),
        ({"quantization_config": {"quant_method": "magic"}}, "quant_method 'magic'"),
    ],
)
def test_a_family_that_is_not_described_is_refused_by_name(changes, complaint):
    with pytest.raises(ConfigError, match=complaint):
        sizes_of({**DENSE, **changes})


def test_a_directory_without_a_config_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"config\.json of a model"):
        read_sizes(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(DENSE))
    assert read_sizes(tmp_path) == sizes_of(DENSE)


def test_gpus_divide_weights_and_kv_and_add_reduces():
    sizes, gpu = sizes_of(DENSE), GPUS["h100"]
    one, four = (cost_on(sizes, gpu, gpus) for gpus in (1, 4))
    assert four.weights_s(1) == pytest.approx(one.weights_s(1) / 4)
    assert four.attention_s(1) == pytest.approx(one.attention_s(1) / 4)
    assert four.overhead_s == pytest.approx(one.overhead_s + 2 * 64 * TYPICAL.reduce_s)
    latent = sizes_of(CONFIGS["deepseek-ai/DeepSeek-V3"])
    assert cost_on(latent, gpu, 8).attention_s(1) < cost_on(latent, gpu, 1).attention_s(1)
    assert cost_on(latent, gpu, 8).kv_bytes_per_token == 8 * latent.kv_bytes_per_token
    assert kv_tokens(sizes, gpu, 1) < kv_tokens(sizes, gpu, 2)
    assert kv_tokens(latent, gpu, 1) < 0


def test_experts_have_a_roofline_of_their_own():
    cost = PRESETS["h200-minimax-m2.5-tp8"]
    few, many = cost.pass_s(8) - cost.pass_s(4), cost.pass_s(128) - cost.pass_s(124)
    assert few > 2 * many  # a few positions touch new experts, many touch them all
    assert cost.pass_s(20_000) - cost.pass_s(10_000) > 5 * (cost.pass_s(11_000) - cost.pass_s(10_000))
    assert cost.weights_s(64) < cost.pass_s(64)
