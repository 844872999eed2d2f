"""Slots or KV memory are full first."""

import json

import pytest
from seer_worker.kv_room import fitting_slots, slots, token_bytes

from seer_core.errors import ConfigError

CONFIG = {
    "dtype": "bfloat16",
    "head_dim": 32,
    "hidden_size": 256,
    "max_position_embeddings": 1024,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
}
TOKEN = 2 * 4 * 2 * 32 * 2
WINDOW = {"sliding_window": 64}


def found(tmp_path, config=CONFIG, kv_cache_bytes=64 * 1024 * TOKEN, **changes):
    (tmp_path / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    settings = {"dtype": "auto", "max_model_tokens": 0, "max_running": 128} | changes
    return slots("toy", tmp_path, kv_cache_bytes, **settings)


def test_the_kv_of_a_token_is_its_keys_and_values_in_every_layer():
    assert token_bytes(CONFIG, "auto") == TOKEN
    assert token_bytes(CONFIG, "float32") == 2 * TOKEN
    assert token_bytes(CONFIG, "auto", tensor_parallel=2) == TOKEN // 2
    assert token_bytes(CONFIG, "auto", tensor_parallel=8) == TOKEN // 2
    without = {
        name: value for name, value in CONFIG.items() if name not in ("head_dim", "num_key_value_heads")
    }
    assert token_bytes(without, "auto") == 4 * TOKEN


def test_latent_attention_keeps_as_much_on_every_rank():
    latent = CONFIG | {"kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert token_bytes(latent, "auto") == token_bytes(latent, "auto", tensor_parallel=8) == 4 * 576 * 2


def test_layers_that_index_tokens_keep_their_indices_too():
    indexed = CONFIG | {
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "index_topk": 2048,
        "index_head_dim": 128,
    }
    latent, index = 4 * 576 * 2, 132
    assert token_bytes(indexed, "auto") == latent + 4 * index
    assert token_bytes(indexed | {"index_topk_freq": 2}, "auto") == latent + 3 * index
    assert token_bytes(indexed | {"index_topk_pattern": "FSSS"}, "auto") == latent + index


def test_the_text_part_of_a_model_that_sees_has_the_kv(tmp_path):
    config = {"dtype": "bfloat16", "text_config": CONFIG | {"dtype": None}, "num_hidden_layers": 99}
    assert token_bytes(config, "auto") == TOKEN
    assert found(tmp_path, config)[0].finding.startswith("KV of 65,536 tokens and 128 slots")


def test_slots_and_windows_share_the_memory(tmp_path):
    [check] = found(tmp_path, CONFIG | {"layer_types": ["sliding_attention", "full_attention"] * 2, **WINDOW})
    assert check.finding.endswith("contexts average less than 960 tokens")  # 960 / 2 + 64 / 2 = 512
    [check] = found(tmp_path, CONFIG | {"use_sliding_window": False, **WINDOW})
    assert check.finding.endswith("contexts average less than 512 tokens")
    [check] = found(tmp_path, CONFIG | WINDOW)
    assert check.remedy.startswith("raise [engine.toy].max_running to 1,024: ")


@pytest.mark.parametrize(
    "field",
    [
        {"kv_lora_rank": 512},
        {"layer_types": ["conv"]},
        {"layer_types": ["linear_attention"]},
        {"ssm_cfg": {"layer": "Mamba1"}},
        {"use_cla": True, "cla_share_factor": 2},
    ],
)
def test_a_model_whose_layers_are_not_described_is_left_alone(tmp_path, field):
    with pytest.raises(ConfigError):
        token_bytes(CONFIG | field, "auto")
    assert found(tmp_path, CONFIG | field) == []


@pytest.mark.parametrize("config", ["", "[]", "{}", '{"max_position_embeddings": 9}'])
def test_a_config_that_does_not_say_it_is_left_alone(tmp_path, config):
    assert found(tmp_path, config) == []


def test_without_a_limit_of_kv_there_is_nothing_to_compare(tmp_path):
    assert found(tmp_path, kv_cache_bytes=None) == []


def test_slots_bind_below_an_average_context(tmp_path):
    [check] = found(tmp_path)
    assert check.ok
    assert check.finding.startswith(
        "KV of 65,536 tokens and 128 slots (max_running): the slots are full first"
    )
    assert check.finding.endswith("contexts average less than 512 tokens")
    assert check.remedy == ""


def test_slots_that_bind_at_any_length_have_a_remedy(tmp_path):
    [check] = found(tmp_path, max_running=16)
    assert check.ok
    assert check.remedy.startswith("raise [engine.toy].max_running to 64: ")
    assert found(tmp_path, max_running=16, max_model_tokens=4096)[0].remedy == ""


def test_slots_suit_contexts_of_an_eighth_of_the_longest_one(tmp_path):
    def fitting(contexts, **changes):
        settings = {"dtype": "auto", "max_model_tokens": 0} | changes
        return fitting_slots(tmp_path, contexts and contexts * 1024 * TOKEN, **settings)

    assert fitting(None) == 64  # there is no checkpoint either
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    assert fitting(None) == 64
    assert fitting(25) == 8 * 25
    assert fitting(25, max_model_tokens=512) == 16 * 25
    assert fitting(25, tensor_parallel=2) == 16 * 25
    assert fitting(2) == 64
    assert fitting(1000) == 1024
