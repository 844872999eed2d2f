"""Slots or KV memory are full first."""

import json

import pytest
from seer_worker.kv_room import fitting_slots, slots, token_bytes

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


@pytest.mark.parametrize(
    "field", [{"kv_lora_rank": 512}, {"sliding_window": 512}, {"layer_types": ["linear_attention"]}]
)
def test_a_model_that_keeps_something_else_is_left_alone(tmp_path, field):
    assert token_bytes(CONFIG | field, "auto") == 0
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
