"""Sizes and KV by a config.json are those of transformers' models and of the engines' reports."""

import json

import pytest
from seer_host.model_kv import kv_of, layers_of, mixers_of, text_of
from seer_sim.sizes import sizes_of
from seer_testing.families import BASE, FAMILIES, config_of
from seer_worker.kv_room import fitting_slots, slots, token_bytes

from bench import render
from seer_core.errors import ConfigError

GIB = 1 << 30
SEEN = "visual", "vision_tower"


@pytest.fixture(scope="module")
def reported():
    """The bytes of a token that engines report, by engine and family."""
    rows = render.results()["models"].rows
    return {(each["engine"], each["family"]): each.get("kv_bytes_per_token") for each in rows}


@pytest.fixture(params=FAMILIES)
def name(request):
    return request.param


def written(name):
    """The config.json of a family, as its models are written."""
    return json.loads(config_of(name).to_json_string(use_diff=False)) | FAMILIES[name].written


UNREPORTED = {"Nemotron-H": 1 * 2 * 2 * 32 * 4, "Falcon-H1": 2 * 2 * 2 * 32 * 4}
"""Of those that vLLM does not serve here: layers of attention x (keys, values) x heads x width x bytes."""
PLAIN = 2 * 2 * 2 * 32
"""Values of a token in two layers of two heads, each 32 wide."""
NOT_IN_THE_MATRIX = {
    **dict.fromkeys(("Qwen2", "Qwen3, tied", "Phi-3", "OLMo-2", "Granite", "GLM-4", "Gemma"), PLAIN * 4),
    **dict.fromkeys(("Mixtral", "OLMoE", "Granite-MoE"), PLAIN * 4),
    "Qwen3, eight bits": PLAIN * 2,
    "Gemma-2": PLAIN * 4 // 2,
    "Mistral": 0,  # each of its layers has a window
}


def test_the_kv_of_a_token_is_what_the_engine_reports(reported, name):
    expected = reported.get(("vllm", name)) or (UNREPORTED | NOT_IN_THE_MATRIX)[name]
    assert token_bytes(written(name), FAMILIES[name].dtype) == expected


def test_a_simulated_model_has_the_kv_and_the_parameters_of_the_real_one(name):
    import transformers

    sizes = sizes_of(written(name))
    kv_bytes = token_bytes(written(name), "bfloat16")
    assert sizes.kv_bytes_per_token == (kv_bytes or PLAIN * 2)
    auto = transformers.AutoModelForCausalLM
    if FAMILIES[name].vision is not None:
        auto = transformers.AutoModelForImageTextToText
    expect_weights(sizes, auto, config_of(name))


def expect_weights(sizes, auto, config):
    """Count the matrices that a step reads of transformers' model."""
    import torch

    with torch.device("meta"):
        model = auto.from_config(config)
    read = sizes.vocabulary * sizes.hidden  # the output's matrix, of which an embedding may be the same
    table = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    for path, value in model.named_parameters():
        matrix = value.ndim >= 2 and not path.endswith("bias") and not any(part in path for part in SEEN)
        read += value.numel() if matrix and all(value is not each for each in table) else 0
    assert sizes.weights + sizes.expert_weights == read


VARIANTS = {
    "Nemotron-H": [
        {"layers_block_type": ["mamba", "moe", "attention", "mlp", "moe"]},
        {"layers_block_type": ["mamba", "moe", "attention", "moe"], "moe_latent_size": 16},
    ],
    "Gemma-4": [
        {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
        {"num_kv_shared_layers": 2, "layer_types": ["sliding_attention", "full_attention"] * 2},
        {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2, "moe_intermediate_size": 32},
    ],
}
"""What published models of these families have, and the tiny ones do not."""


@pytest.mark.parametrize(
    ("name", "settings"), [(name, each) for name, variants in VARIANTS.items() for each in variants]
)
def test_so_have_variants_of_a_family(name, settings):
    import transformers

    family = FAMILIES[name]
    config = getattr(transformers, family.config)(**BASE | family.settings | settings)
    as_json = json.loads(config.to_json_string(use_diff=False))
    expect_weights(sizes_of(as_json), transformers.AutoModelForCausalLM, config)


def test_slots_follow_the_kv_of_every_family(tmp_path, name):
    (tmp_path / "config.json").write_text(json.dumps(written(name)))

    def fitting(kv_bytes, **more):
        settings = {"dtype": "bfloat16", "max_model_tokens": 8192} | more
        return fitting_slots(tmp_path, kv_bytes, **settings)

    assert fitting(None) == 64
    assert fitting(4 * GIB) == 1024
    # A context of an eighth of the longest, its windows and two states.
    kv = kv_of(written(name))
    request = 2 * kv.request_values(1024) + 2 * kv.state_bytes(2)
    assert fitting(int(200 * request)) == 200
    assert fitting(int(200 * request), every_layer=True) <= 200 or kv.states
    [check] = slots(
        "toy", tmp_path, int(200 * request), dtype="bfloat16", max_model_tokens=8192, max_running=200
    )
    assert check.finding.endswith("contexts average less than 1,024 tokens") or not kv.token_values()


def test_a_window_takes_no_more_than_itself_and_a_state_as_much_of_every_request(tmp_path):
    sliding, recurrent = kv_of(written("Gemma-3")), kv_of(written("Qwen3.5"))
    a_token = 2 * 2 * 32
    assert sliding.request_values(10) == 4 * 10 * a_token
    assert sliding.request_values(1000) == (1000 + 3 * 64) * a_token
    assert recurrent.request_values(1000) == 1000 * a_token
    keys = values = 2 * 64
    convolution, state = (2 * keys + values) * 3, 2 * 64 * 64
    assert recurrent.state_bytes(2) == 3 * (convolution * 2 + state * 4)
    assert recurrent.state_bytes(2, ranks=2) == recurrent.state_bytes(2) / 2
    mamba = kv_of(written("Falcon-H1"))
    assert mamba.state_bytes(4) == 2 * ((128 + 2 * 16) * 3 + 128 * 16) * 4


def test_sglang_counts_every_layer_as_if_it_saw_the_whole_context(tmp_path, reported):
    (tmp_path / "config.json").write_text(json.dumps(written("Gemma-3")))
    settings = {"dtype": "float32", "max_model_tokens": 8192, "every_layer": True}
    assert fitting_slots(tmp_path, 200 * 1024 * reported["sglang", "Gemma-3"], **settings) == 200


def test_a_published_gemma_has_wider_heads_where_it_sees_everything():
    config = written("Gemma-4")
    del config["per_layer_config"]
    plain = token_bytes(config | {"global_head_dim": 32}, "bfloat16")
    assert token_bytes(config | {"global_head_dim": 64}, "bfloat16") == 2 * plain
    few = {"attention_k_eq_v": True, "num_global_key_value_heads": 1, "global_head_dim": 32}
    assert token_bytes(config | few, "bfloat16") == plain // 2
    assert token_bytes(config | {"global_head_dim": 32, "num_kv_shared_layers": 1}, "bfloat16") == 0


KINDS = {"linear_attention": "mamba", "full_attention": "full", "chunked_attention": "window"}


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("Llama4TextConfig", {"num_hidden_layers": 8}),
        ("Llama4TextConfig", {"num_hidden_layers": 6, "no_rope_layers": [1, 0, 1, 1, 0, 1]}),
        ("Llama4TextConfig", {"num_hidden_layers": 6, "no_rope_layer_interval": 3}),
        ("BambaConfig", {"num_hidden_layers": 6, "attn_layer_indices": [2, 5]}),
        ("GraniteMoeHybridConfig", {"num_hidden_layers": 2, "layer_types": ["linear_attention"] * 2}),
    ],
)
def test_layers_that_a_config_leaves_to_transformers_are_those_that_it_makes(config, settings):
    import transformers

    made = getattr(transformers, config)(**settings)
    written = {"model_type": made.model_type, "num_attention_heads": 8, "hidden_size": 512} | settings
    written |= {"attention_chunk_size": 8192} if "Llama" in config else {"mamba_n_heads": 8}
    found = [layer.mixer for layer in layers_of(text_of(written))]
    assert found == [KINDS[each] for each in made.layer_types]


HYBRID = {
    "vocab_size": 96,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_expand": 2,
}


@pytest.mark.parametrize(
    ("config", "settings"),
    [
        ("BambaConfig", {"num_hidden_layers": 3, "attn_layer_indices": [1], "intermediate_size": 48}),
        ("GraniteMoeHybridConfig", {"num_local_experts": 0}),
        ("GraniteMoeHybridConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
        ("Llama4TextConfig", {"num_local_experts": 4, "interleave_moe_layer_step": 2}),
    ],
)
def test_layers_have_a_dense_part_or_a_mixture_and_what_all_positions_use_beside_it(config, settings):
    import transformers

    if config.startswith("Llama"):
        settings |= {"intermediate_size": 48, "intermediate_size_mlp": 80, "num_hidden_layers": 4}
    if config.startswith("Granite"):
        settings |= {"intermediate_size": 48, "shared_intermediate_size": 80, "num_hidden_layers": 3}
        settings |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
    made = getattr(transformers, config)(**HYBRID | settings)
    as_json = json.loads(made.to_json_string(use_diff=False))
    expect_weights(sizes_of(as_json), transformers.AutoModelForCausalLM, made)


@pytest.mark.parametrize(
    "settings",
    [
        {"model_type": "jamba", "attn_layer_period": 8, "attn_layer_offset": 4, "mamba_d_state": 16},
        {"model_type": "minimax_text_01", "attn_type_list": [0, 0, 0, 1]},
    ],
    ids=["Jamba", "MiniMax-Text-01"],
)
def test_families_whose_recurrent_layers_are_not_described_are_not_taken_for_others(settings):
    with pytest.raises(ConfigError, match="are not described here"):
        kv_of(CONFIG | settings)
    assert mixers_of(CONFIG | settings) == set()


@pytest.mark.parametrize(
    ("settings", "heads"),
    [
        ({"multi_query": True, "new_decoder_architecture": False}, 1),  # Falcon-7B
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 2}, 2),  # Falcon-40B
        ({"n_head_kv": 2}, 2),
        ({"num_attention_groups": 4}, 4),  # Step-3.5
        ({}, 8),
    ],
)
def test_heads_of_keys_are_found_by_the_names_that_vllm_reads(settings, heads):
    plain = {name: value for name, value in CONFIG.items() if name != "num_key_value_heads"}
    assert {layer.heads for layer in kv_of(plain | settings).layers} == {heads}


def test_layers_of_plain_attention_are_described_also_where_a_list_of_kinds_says_so():
    assert kv_of(CONFIG | {"attn_type_list": [1] * 4}) == kv_of(CONFIG)


CONFIG = {"num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 256}
