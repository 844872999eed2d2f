"""Checks before either has run: can the engines load the trainer's weights, and agree with its log-probs?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
from seer_host.json_files import UNREADABLE, describe_flaw, read_bytes
from seer_session import Config

from seer_core.errors import ConfigError
from seer_rl.config import TrainTable, engine_models, first_model
from seer_rl.errors import TrainError

__all__ = ["check_model_fit", "experts_per_token"]

SHAPE_KEYS = (
    "model_type",
    "vocab_size",
    "tie_word_embeddings",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
)
"""Keys of ``config.json`` that decide names and shapes of tensors, compared where both models have them."""

EXPERTS_KEYS = ("num_experts_per_tok", "experts_per_token", "top_k_experts")

BFLOAT16_DLOGP = 1e-3
"""Engines in bfloat16 are 3.4e-3 nats from a trainer in float32 on average, measured on the tiny reasoner."""


def check_model_fit(table: TrainTable, config: Config, trainer_tokens: int, engine_tokens: int) -> None:
    """Refuse a trainer whose weights the engines could not load, or whose log-probs cannot be theirs.

    ``trainer_tokens`` and ``engine_tokens`` are the sizes of the vocabularies of both models.

    Raises:
        TrainError: they do not fit.
        ConfigError: a model's ``config.json`` cannot be read.
    """
    ours = first_model(table, config)
    for engine, theirs in engine_models(config).items():
        described = _model_config(theirs)
        if theirs != ours:
            _check_models(ours, theirs)
        dtype = config.engine[engine].get("dtype", "auto")
        if dtype == "auto":
            dtype = described.get("dtype", described.get("torch_dtype"))
        if dtype == "bfloat16" and 0 < table.max_dlogp < BFLOAT16_DLOGP:
            raise TrainError(
                "the engines compute in bfloat16, and the trainer in float32, which are further apart than"
                f" [train].max_dlogp = {table.max_dlogp:g} allows: set [engine.{engine}].dtype ="
                ' "float32", or raise max_dlogp'
            )
    if trainer_tokens != engine_tokens:
        raise TrainError(
            f"the trainer's model has {trainer_tokens} tokens and the engines' {engine_tokens}: give both the"
            " same model"
        )


def experts_per_token(table: TrainTable, config: Config) -> int | None:
    """Return how many experts of a layer compute a token of the trainer's model; None if it says nothing."""
    described = _model_config(first_model(table, config))
    return next((described[key] for key in EXPERTS_KEYS if isinstance(described.get(key), int)), None)


def _check_models(ours: Path, theirs: Path) -> None:
    own, other = _model_config(ours), _model_config(theirs)
    facts = [
        f"{key} {own[key]} and {other[key]}"
        for key in SHAPE_KEYS
        if key in own and key in other and own[key] != other[key]
    ]
    if facts:
        raise TrainError(
            f"the trainer's model, {ours}, is not like the engines', {theirs}: {', '.join(facts)}; give both"
            " the same model"
        )


def _model_config(model: Path) -> dict[str, Any]:
    """Read a model's ``config.json``, with the part of its language model where that is nested."""
    path, remedy = model / "config.json", "name the directory of a Hugging Face model"
    raw = read_bytes(path, remedy, ConfigError)
    try:
        found = msgspec.json.decode(raw, type=dict[str, Any])
        return found | msgspec.convert(found.get("text_config", {}), dict[str, Any])
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} is no model's configuration: {describe_flaw(error, raw)}; {remedy}"
        ) from error
