"""Weights between Hugging Face's names and Megatron-core's, part by part, without Megatron-core."""

import json

import pytest
import torch
from safetensors.torch import load_file
from seer_rl.megatron_weights import Share, file_name, from_megatron, index, read_share
from transformers import AutoConfig


@pytest.fixture(scope="module")
def config(model):
    return AutoConfig.from_pretrained(model)


def whole(config, model, tensor_parallel, stages):
    """Read a model in parts, and put the parts together again."""
    found = {}
    for stage in range(stages):
        shares = [Share(config, rank, tensor_parallel, stage, stages) for rank in range(tensor_parallel)]
        weights = [read_share(model, share) for share in shares]
        parts = [[] for _ in shares]  # of each rank, in the order in which tensors are gathered

        for share, own, gathered in zip(shares, weights, parts, strict=True):

            def record(part, gathered=gathered):
                gathered.append(part)
                return [part]

            from_megatron(own, share, record)
        columns = iter(zip(*parts, strict=True))
        found |= from_megatron(weights[0], shares[0], lambda _, columns=columns: list(next(columns)))
    return found


@pytest.mark.parametrize(("tensor_parallel", "stages"), [(1, 1), (2, 1), (1, 2), (2, 2)])
def test_parts_of_a_model_make_the_whole_one_again_bit_for_bit(config, model, tensor_parallel, stages):
    expected = load_file(model / "model.safetensors")
    found = whole(config, model, tensor_parallel, stages)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_rank_reads_its_own_heads_and_columns_alone(config, model):
    alone, half = (read_share(model, Share(config, 0, ranks, 0, 1)) for ranks in (1, 2))
    assert alone.keys() == half.keys()
    cut = {name.split(".", 3)[-1] for name in alone if half[name].numel() * 2 == alone[name].numel()}
    assert cut == {
        "weight",  # of the embedding
        "self_attention.linear_qkv.weight",
        "self_attention.linear_proj.weight",
        "mlp.linear_fc1.weight",
        "mlp.linear_fc2.weight",
    }


def test_the_index_names_each_tensor_s_file(config, model):
    files = json.loads(index(config, 2))["weight_map"]
    assert files.keys() == load_file(model / "model.safetensors").keys()
    assert set(files.values()) == {file_name(0, 2), file_name(1, 2)}
    assert files["model.layers.1.mlp.up_proj.weight"] == "model-00002-of-00002.safetensors"
