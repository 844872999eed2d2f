"""Tiny random models of many families, as transformers saves them, and what an update of one must be."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from seer_core.model import Sampling
from seer_core.ports.weights import directory

__all__ = ["FAMILIES", "expect_updates_to_equal_starts", "write_family"]

TOKENIZER = Path(__file__).parents[2] / "examples" / "tiny_reasoner" / "weights"
VOCABULARY = 96
BASE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "initializer_range": 0.15,
}
HEADS: dict[str, Any] = {"head_dim": 32}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
EIGHT_BITS: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True}
QUANTISED: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "int-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": EIGHT_BITS | {"strategy": "channel", "dynamic": False},
            "input_activations": EIGHT_BITS | {"strategy": "token", "dynamic": True},
        }
    },
}
SAMPLINGS = Sampling(0.0, ignore_eos=True), Sampling(1.0, ignore_eos=True)
SLIDING: dict[str, Any] = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}


@attrs.frozen
class Family:
    """A family's configuration beside ``BASE``, and what a CPU computes it in."""

    config: str
    settings: dict[str, Any] = attrs.field(factory=dict)
    dtype: str = "float32"
    quantised: bool = False


FAMILIES = {
    "qwen2": Family("Qwen2Config"),
    "qwen3": Family("Qwen3Config", HEADS),
    "qwen3, tied": Family("Qwen3Config", HEADS | {"tie_word_embeddings": True}),
    "qwen3, eight bits": Family("Qwen3Config", HEADS, "bfloat16", quantised=True),
    "llama": Family("LlamaConfig"),
    "mistral": Family("MistralConfig", HEADS),
    "gemma": Family("GemmaConfig", HEADS),
    "gemma2": Family("Gemma2Config", HEADS | SLIDING | {"query_pre_attn_scalar": 32}),
    "gemma3": Family("Gemma3TextConfig", HEADS | SLIDING | {"query_pre_attn_scalar": 32}),
    "gemma4": Family(
        "Gemma4TextConfig",
        HEADS
        | SLIDING
        | {
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
    ),
    "phi3": Family("Phi3Config"),
    "olmo2": Family("Olmo2Config"),
    "granite": Family("GraniteConfig"),
    "glm4": Family("Glm4Config", HEADS),
    "qwen3 with experts": Family("Qwen3MoeConfig", HEADS | EXPERTS | {"norm_topk_prob": True}),
    "mixtral": Family("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "olmo with experts": Family("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "granite with experts": Family("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "glm4 with experts": Family(
        "Glm4MoeConfig",
        HEADS
        | {
            "moe_intermediate_size": 64,
            "num_experts_per_tok": 2,
            "n_shared_experts": 1,
            "n_routed_experts": 8,
            "first_k_dense_replace": 1,
            "use_qk_norm": True,
        },
    ),
    "gpt-oss": Family(
        "GptOssConfig",
        HEADS
        | SLIDING
        | {
            "intermediate_size": 64,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 4096,
            },
        },
    ),
    "qwen3-next": Family(
        "Qwen3NextConfig",
        HEADS
        | EXPERTS
        | {
            "linear_key_head_dim": 128,
            "linear_value_head_dim": 128,
            "linear_num_key_heads": 1,
            "linear_num_value_heads": 2,
            "shared_expert_intermediate_size": 64,
            "layer_types": ["linear_attention", "full_attention"],
        },
        "bfloat16",
    ),
}


def write_family(directory: Path, name: str, seed: int) -> Path:
    """Write a model with random weights, which ``seed`` chooses."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    family = FAMILIES[name]
    torch.manual_seed(seed)
    config = getattr(transformers, family.config)(**BASE | family.settings)
    config.dtype = torch.float32
    model = transformers.AutoModelForCausalLM.from_config(config).to(torch.float32)
    with torch.no_grad():
        for path, value in [*model.named_parameters(), *model.named_buffers()]:
            if path.endswith(("sinks", "bias")):  # and the bias that chooses experts
                value.normal_(0, 0.5)
            elif value.ndim == 1 and path.endswith("norm.weight"):
                value += 0.2 * torch.randn_like(value)
            elif value.ndim >= 2 and float(value.std()) < 1e-6:  # experts that are left as they were made
                value.normal_(0, 0.15)
    model.save_pretrained(directory)
    if family.quantised:
        _quantise(directory)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(TOKENIZER / file, directory)
    return directory


def _quantise(directory: Path) -> None:
    """Round every matrix of a layer to eight bits, with a scale for each row."""
    from safetensors.torch import load_file, save_file

    path, tensors = directory / "model.safetensors", {}
    for name, tensor in load_file(path).items():
        tensors[name] = tensor
        if ".layers." in name and tensor.ndim == 2:
            scale = tensor.abs().amax(1, keepdim=True) / 127
            tensors[name] = (tensor / scale).round().char()
            tensors[f"{name}_scale"] = scale
    save_file(tensors, path, metadata={"format": "pt"})
    config = json.loads((directory / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(config | {"quantization_config": QUANTISED}))


def _answers(harness: Any, prompts: Sequence[Sequence[int]]) -> tuple[list[list[int]], np.ndarray]:
    """Return the tokens and log-probs of responses, greedy ones and drawn ones."""
    within = [[token % VOCABULARY for token in prompt] for prompt in prompts]
    jobs = [harness.job(prompt, 24, seed, SAMPLINGS[seed % 2]) for seed, prompt in enumerate(within)]
    outputs = harness.run(harness.chunks(jobs))
    return [each.token_ids for each in outputs], np.concatenate([each.logprobs for each in outputs])


def expect_updates_to_equal_starts(
    start: Callable[..., Any], folder: Path, prompts: Sequence[Sequence[int]], name: str
) -> None:
    """Compare an engine after an update, and after one back, with engines started on the weights."""
    old, new = (write_family(folder / each, name, seed) for seed, each in enumerate("ab", 1))
    settings = {"dtype": FAMILIES[name].dtype, "max_model_tokens": 128, "max_running": 8}
    fresh = start(new, **settings)
    expected = {new: _answers(fresh, prompts)}
    fresh.run(fresh.engine.stop())
    harness = start(old, **settings)
    expected[old] = _answers(harness, prompts)
    assert expected[old][0] != expected[new][0]
    assert harness.info.fingerprint != fresh.info.fingerprint
    for model in (new, old):
        harness.weight_version += 1
        harness.run(harness.engine.update_weights(directory(model), harness.weight_version))
        tokens, logprobs = _answers(harness, prompts)
        assert tokens == expected[model][0]
        assert (logprobs == expected[model][1]).all()
    harness.run(harness.engine.stop())
