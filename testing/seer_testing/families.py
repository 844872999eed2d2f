"""Tiny random models of the families that people train, written as transformers saves them.

    python -m seer_testing.families --tokenizer DIR [--seed N] FOLDER [FAMILY ...]

Nothing is downloaded.  Needs torch and transformers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import attrs

__all__ = ["FAMILIES", "IMAGE_TOKENS", "VOCABULARY", "Family", "config_of", "write_family"]

VOCABULARY = 96
"""The tokens of a model of text, which are those of the bundled example's tokenizer."""
IMAGE_TOKENS = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
"""The tokens that a model of images has besides, from number 96 on."""
TEMPLATE = (
    "{% for message in messages %}{% if message['content'] is string %} {{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if 'text' in part %} {{ part['text'] }}{% else %}"
    "<|vision_start|><|image_pad|><|vision_end|>{% endif %}{% endfor %}{% endif %}{% endfor %}"
)

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
FOUR_LAYERS: dict[str, Any] = {"num_hidden_layers": 4}
EXPERTS: dict[str, Any] = {
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
}
SHARED_EXPERTS: dict[str, Any] = {
    "moe_intermediate_size": 64,
    "num_experts_per_tok": 2,
    "n_shared_experts": 1,
    "n_routed_experts": 8,
    "first_k_dense_replace": 1,
}
SLIDING: dict[str, Any] = {"sliding_window": 64, "layer_types": ["sliding_attention", "full_attention"]}
MOSTLY_SLIDING: dict[str, Any] = FOUR_LAYERS | {
    "sliding_window": 64,
    "layer_types": [*["sliding_attention"] * 3, "full_attention"],
}
DELTA_NET: dict[str, Any] = FOUR_LAYERS | {
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
}
MAMBA: dict[str, Any] = FOUR_LAYERS | {
    "mamba_num_heads": 8,
    "mamba_head_dim": 16,
    "ssm_state_size": 16,
    "n_groups": 2,
    "chunk_size": 32,
}
LATENT: dict[str, Any] = {
    "kv_lora_rank": 512,  # the sizes of the released ones, for kernels take no others
    "q_lora_rank": None,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 128,
    "v_head_dim": 128,
    "n_group": 1,
    "topk_group": 1,
    "routed_scaling_factor": 2.446,
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


@attrs.frozen
class Family:
    """A family: the name of its configuration, and what it has beside or instead of ``BASE``.

    ``dtype`` is what a CPU computes it in.  A family with ``vision`` takes images; ``settings`` then describe
    its text part.  ``written`` is added to the ``config.json``, for engines that read what
    transformers has no name for.
    """

    config: str
    settings: dict[str, Any] = attrs.field(factory=dict)
    dtype: str = "float32"
    quantised: bool = False
    vision: dict[str, Any] | None = None
    processor: str = ""
    written: dict[str, Any] = attrs.field(factory=dict)

    @property
    def vocabulary(self) -> int:
        """The number of its tokens."""
        return VOCABULARY + (8 if self.vision else 0)


def _rope(sections: list[int], **more: Any) -> dict[str, Any]:
    """Return places of three axes: time, height and width."""
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": sections, **more}
    return {"rope_parameters": rope}


VISION: dict[str, Any] = {
    "depth": 2,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_heads": 2,
    "out_hidden_size": 64,
    "initializer_range": 0.15,
}
DELTA_VISION: dict[str, Any] = VISION | {"patch_size": 16, "num_position_embeddings": 64}
DELTA_ROPE = _rope([2, 1, 1], mrope_interleaved=True, partial_rotary_factor=0.25)

FAMILIES = {
    "Llama": Family("LlamaConfig"),
    "Mistral": Family("MistralConfig", HEADS),
    "Qwen2": Family("Qwen2Config"),
    "Qwen3": Family("Qwen3Config", HEADS),
    "Qwen3, tied": Family("Qwen3Config", HEADS | {"tie_word_embeddings": True}),
    "Qwen3, eight bits": Family("Qwen3Config", HEADS, "bfloat16", quantised=True),
    "Phi-3": Family("Phi3Config"),
    "OLMo-2": Family("Olmo2Config"),
    "Granite": Family("GraniteConfig"),
    "GLM-4": Family("Glm4Config", HEADS),
    "Gemma": Family("GemmaConfig", HEADS),
    "Gemma-2": Family("Gemma2Config", HEADS | SLIDING | {"query_pre_attn_scalar": 32}),
    "Gemma-3": Family("Gemma3TextConfig", HEADS | MOSTLY_SLIDING | {"query_pre_attn_scalar": 32}),
    "Gemma-4": Family(
        "Gemma4TextConfig",
        HEADS
        | MOSTLY_SLIDING
        | {
            "global_head_dim": 64,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": VOCABULARY,
            "num_kv_shared_layers": 0,
        },
    ),
    "Qwen3-MoE": Family("Qwen3MoeConfig", HEADS | EXPERTS | {"norm_topk_prob": True}),
    "Mixtral": Family("MixtralConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "OLMoE": Family("OlmoeConfig", {"num_experts": 8, "num_experts_per_tok": 2}),
    "Granite-MoE": Family("GraniteMoeConfig", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "GLM-4-MoE": Family("Glm4MoeConfig", HEADS | SHARED_EXPERTS | {"use_qk_norm": True}),
    "gpt-oss": Family(
        "GptOssConfig",
        HEADS
        | FOUR_LAYERS
        | {
            "sliding_window": 64,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
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
    "DeepSeek-V3": Family(
        "DeepseekV3Config",
        SHARED_EXPERTS | LATENT | {"num_mtp_layers": 0},
        written={"topk_method": "noaux_tc", "scoring_func": "sigmoid", "num_nextn_predict_layers": 0},
    ),
    "Qwen3-Next": Family(
        "Qwen3NextConfig",
        HEADS | EXPERTS | DELTA_NET | {"shared_expert_intermediate_size": 64},
        "bfloat16",
        written={"full_attention_interval": 4},
    ),
    "Qwen3.5": Family(
        "Qwen3_5Config",
        HEADS | DELTA_NET | DELTA_ROPE,
        "bfloat16",
        vision=DELTA_VISION,
        processor="Qwen3VL",
    ),
    "Qwen3.5-MoE": Family(
        "Qwen3_5MoeConfig",
        HEADS | DELTA_NET | EXPERTS | DELTA_ROPE | {"shared_expert_intermediate_size": 64},
        "bfloat16",
        vision=DELTA_VISION,
        processor="Qwen3VL",
    ),
    "Nemotron-H": Family(
        "NemotronHConfig",
        HEADS
        | MAMBA
        | {
            "layers_block_type": ["mamba", "attention", "moe", "mlp"],
            "n_routed_experts": 4,
            "moe_intermediate_size": 64,
            "moe_shared_expert_intermediate_size": 64,
            "num_experts_per_tok": 2,
        },
        written={"layers_block_type": ["mamba", "attention", "moe", "mlp"]},  # SGLang's names
    ),
    "Falcon-H1": Family(
        "FalconH1Config",
        HEADS
        | {
            "hidden_size": 128,
            "mamba_d_ssm": 128,
            "mamba_n_heads": 8,
            "mamba_d_head": 16,
            "mamba_n_groups": 1,
            "mamba_d_state": 16,
            "mamba_chunk_size": 32,
        },
    ),
    "Qwen2-VL": Family(
        "Qwen2VLConfig",
        HEADS | _rope([4, 6, 6]),
        vision={
            "depth": 2,
            "embed_dim": 64,
            "hidden_size": 64,
            "num_heads": 2,
            "mlp_ratio": 2,
            "patch_size": 14,
            "in_chans": 3,  # SGLang's name of the channels
            "initializer_range": 0.15,
        },
        processor="Qwen2VL",
    ),
    "Qwen2.5-VL": Family(
        "Qwen2_5_VLConfig",
        HEADS | _rope([4, 6, 6]),
        vision=VISION | {"patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1]},
        processor="Qwen2_5_VL",
    ),
    "Qwen3-VL": Family(
        "Qwen3VLConfig",
        HEADS | _rope([6, 5, 5], mrope_interleaved=True),
        vision=DELTA_VISION | {"deepstack_visual_indexes": [0]},
        processor="Qwen3VL",
    ),
}
"""The families by name; all settings are those of transformers."""


def config_of(name: str) -> Any:
    """Return a family's configuration, of transformers' class."""
    import transformers

    family = FAMILIES[name]
    made = getattr(transformers, family.config)
    if family.vision is None:
        return made(**BASE | family.settings)
    text = BASE | {"vocab_size": family.vocabulary} | family.settings
    places = dict(zip(_IMAGE_FIELDS, range(VOCABULARY, VOCABULARY + 4), strict=True))
    return made(text_config=text, vision_config=family.vision, **places)


def write_family(directory: Path, name: str, seed: int, tokenizer: Path) -> Path:
    """Write a model with random weights, which ``seed`` chooses, and the tokenizer of another model.

    Returns:
        ``directory``.
    """
    import torch
    import transformers

    family, config = FAMILIES[name], config_of(name)
    torch.manual_seed(seed)
    auto: Any = transformers.AutoModelForCausalLM
    if family.vision is not None:
        auto = transformers.AutoModelForImageTextToText
    config.dtype = torch.float32
    model = auto.from_config(config).to(torch.float32)
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
        shutil.copy(tokenizer / file, directory)
    if family.vision is not None:
        _add_images(directory, family, model.config.vision_config.patch_size)
    _change(directory / "config.json", family.written)
    return directory


_IMAGE_FIELDS = ("image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id")


def _change(path: Path, changes: dict[str, Any]) -> None:
    """Write some fields of a JSON file anew."""
    path.write_text(json.dumps(json.loads(path.read_text()) | changes, indent=1))


def _add_images(directory: Path, family: Family, patch: int) -> None:
    """Add the tokens of images to the tokenizer, and say how pictures become patches."""
    from transformers import PreTrainedTokenizerFast

    tokenizer: Any = PreTrainedTokenizerFast.from_pretrained(str(directory))
    fill = [f"<|unused{number}|>" for number in range(VOCABULARY - len(tokenizer))]
    tokenizer.add_special_tokens({"additional_special_tokens": [*fill, *IMAGE_TOKENS]})
    tokenizer.chat_template = TEMPLATE
    tokenizer.save_pretrained(directory)
    (directory / "chat_template.jinja").write_text(TEMPLATE)
    area = patch * patch
    form = {
        "image_processor_type": "Qwen2VLImageProcessor",
        "processor_class": f"{family.processor}Processor",
        "patch_size": patch,
        "temporal_patch_size": 2,
        "merge_size": 2,
        "min_pixels": 16 * area,
        "max_pixels": 64 * area,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "size": {"shortest_edge": 16 * area, "longest_edge": 64 * area},
    }
    (directory / "preprocessor_config.json").write_text(json.dumps(form))
    videos = "Qwen3VL" if family.processor == "Qwen3VL" else "Qwen2VL"
    film = form | {"video_processor_type": f"{videos}VideoProcessor"}
    (directory / "video_preprocessor_config.json").write_text(json.dumps(film))


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
    _change(directory / "config.json", {"quantization_config": QUANTISED})


def main(arguments: list[str]) -> None:
    """Write models as the command line says, each into a folder of its name."""
    parser = argparse.ArgumentParser(
        prog="python -m seer_testing.families",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--tokenizer", type=Path, required=True, help="a model's directory")
    parser.add_argument("--seed", type=int, default=1, help="of the weights (default 1)")
    parser.add_argument("folder", type=Path)
    parser.add_argument("families", nargs="*", help="names (default: all)")
    options = parser.parse_args(arguments)
    for name in options.families or FAMILIES:
        print(write_family(options.folder / name, name, options.seed, options.tokenizer), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
