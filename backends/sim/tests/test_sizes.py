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


PUBLISHED = {
    "Qwen/Qwen3-30B-A3B": (
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 6144,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "head_dim": 128,
            "vocab_size": 151936,
            "num_experts": 128,
            "num_experts_per_tok": 8,
            "moe_intermediate_size": 768,
        },
        48 * 2 * 4 * 128 * 2,
        30_532_122_624,
    ),
    "Qwen/Qwen3.5-35B-A3B": (
        {
            "text_config": {
                "num_hidden_layers": 40,
                "hidden_size": 2048,
                "num_attention_heads": 16,
                "num_key_value_heads": 2,
                "head_dim": 256,
                "vocab_size": 248320,
                "full_attention_interval": 4,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "moe_intermediate_size": 512,
                "shared_expert_intermediate_size": 512,
            }
        },
        10 * 2 * 2 * 256 * 2,
        34_660_610_688,
    ),
    "Qwen/Qwen3.5-9B": (
        {
            "text_config": {
                "num_hidden_layers": 32,
                "hidden_size": 4096,
                "intermediate_size": 12288,
                "num_attention_heads": 16,
                "num_key_value_heads": 4,
                "head_dim": 256,
                "vocab_size": 248320,
                "layer_types": [*["linear_attention"] * 3, "full_attention"] * 8,
                "linear_num_key_heads": 16,
                "linear_num_value_heads": 32,
                "linear_key_head_dim": 128,
                "linear_value_head_dim": 128,
            }
        },
        8 * 2 * 4 * 256 * 2,
        8_953_803_264,
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": (
        {
            "num_hidden_layers": 48,
            "hidden_size": 2048,
            "intermediate_size": 5120,
            "num_attention_heads": 16,
            "num_key_value_heads": 2,
            "head_dim": 256,
            "vocab_size": 151936,
            "full_attention_interval": 4,
            "linear_num_key_heads": 16,
            "linear_num_value_heads": 32,
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "num_experts": 512,
            "num_experts_per_tok": 10,
            "moe_intermediate_size": 512,
            "shared_expert_intermediate_size": 512,
            "decoder_sparse_step": 1,
            "mlp_only_layers": [],
        },
        12 * 2 * 2 * 256 * 2,
        79_674_391_296,
    ),
    "deepseek-ai/DeepSeek-V3": (CONFIGS["deepseek-ai/DeepSeek-V3"], 61 * 576 * 2, 671_026_404_352),
    "moonshotai/Moonlight-16B-A3B": (
        {
            "num_hidden_layers": 27,
            "hidden_size": 2048,
            "intermediate_size": 11264,
            "num_attention_heads": 16,
            "num_key_value_heads": 16,
            "vocab_size": 163840,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "moe_intermediate_size": 1408,
            "first_k_dense_replace": 1,
            "moe_layer_freq": 1,
            "kv_lora_rank": 512,
            "q_lora_rank": None,
            "qk_rope_head_dim": 64,
            "qk_nope_head_dim": 128,
            "v_head_dim": 128,
        },
        27 * 576 * 2,
        15_960_108_544,
    ),
    "google/gemma-3-27b-it": (
        {
            "text_config": {
                "model_type": "gemma3_text",
                "num_hidden_layers": 62,
                "hidden_size": 5376,
                "intermediate_size": 21504,
                "num_attention_heads": 32,
                "num_key_value_heads": 16,
                "head_dim": 128,
                "sliding_window": 1024,
            },
            "tie_word_embeddings": True,
        },
        10 * 2 * 16 * 128 * 2,
        27_009_346_304,
    ),
    "openai/gpt-oss-120b": (CONFIGS["openai/gpt-oss-120b"], 18 * 2 * 8 * 64 * 2, 116_829_156_672),
    "Qwen/Qwen2.5-VL-72B-Instruct": (
        {
            "num_hidden_layers": 80,
            "hidden_size": 8192,
            "intermediate_size": 29568,
            "num_attention_heads": 64,
            "num_key_value_heads": 8,
            "vocab_size": 152064,
            "sliding_window": 32768,
            "use_sliding_window": False,
        },
        80 * 2 * 8 * 128 * 2,
        72_706_203_648,
    ),
}
"""Sizes as the published config.json has them, the bytes of a token's KV by hand from them, and the
parameters of the text model that transformers 5.19 makes of them (on the device "meta"; without prediction
heads, which it does not make): 30.5 B, 80 B, 671 B, 16 B, 27 B, 117 B and 72.7 B on the models' cards.
"""


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_their_kv_and_their_parameters(name):
    config, kv_bytes, parameters = PUBLISHED[name]
    sizes = sizes_of(config)
    assert sizes.kv_bytes_per_token == kv_bytes
    table = 0 if config.get("tie_word_embeddings") else sizes.vocabulary * sizes.hidden
    assert sizes.weights + sizes.expert_weights + table == pytest.approx(parameters, rel=0.0005)


def test_kv_is_that_of_grouped_latent_and_sliding_attention():
    assert sizes_of(DENSE).kv_bytes_per_token == 64 * 2 * 8 * 128 * 2
    latent = sizes_of(CONFIGS["deepseek-ai/DeepSeek-V3"])
    assert latent.kv_bytes_per_token == 61 * 576 * 2
    assert latent.kv_heads == 1
    assert sizes_of(CONFIGS["openai/gpt-oss-120b"]).kv_bytes_per_token == 18 * 2 * 8 * 64 * 2
    hybrid = {
        **DENSE,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
    }
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
        ({"hybrid_override_pattern": "M-M*"}, "mamba_num_heads"),
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
