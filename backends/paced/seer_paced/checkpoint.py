"""A model's directory without weights, which vLLM or SGLang reads before it makes an engine."""

from __future__ import annotations

import json
from pathlib import Path

from seer_sim.tokens import EOS_TOKEN_ID

__all__ = ["write_checkpoint"]

HIDDEN_SIZE = 64


def write_checkpoint(
    directory: Path, vocab_size: int, max_model_tokens: int, head_size: int = HIDDEN_SIZE
) -> Path:
    """Write the configuration of a small model that will not run; return its directory."""
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": vocab_size,
        "max_position_embeddings": max_model_tokens,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": HIDDEN_SIZE // head_size,
        "num_key_value_heads": 1,
        "torch_dtype": "bfloat16",
        "eos_token_id": EOS_TOKEN_ID,
        "bos_token_id": 1,
    }
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    return directory
