"""A model's tokenizer as plain data, which any process can use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from msgspec import Struct
from seer_host.json_files import JsonFormat, describe_flaw, read_bytes

from seer_core.errors import ConfigError

__all__ = ["REMEDY", "TokenizerReading", "has_tokenizer", "require_sound"]

REMEDY = "copy the model's files anew"

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "vocab.txt",
)
"""Files of which every tokenizer has one."""

OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
)
"""Files that hold a JSON object each; transformers passes over some of them if they are damaged."""

_OBJECT = JsonFormat[dict[str, Any]](dict[str, Any], "no tokenizer's configuration", REMEDY, ConfigError)


class TokenizerReading(Struct, frozen=True):
    """A model's tokenizer as ``transformers.AutoTokenizer`` reads it, and the tokens that end a response."""

    end_token_ids: tuple[int, ...]
    """The tokens with which the model ends a response, in order: those with which vLLM lets it."""
    kind: str = ""
    """The name of the tokenizer's class; empty where there is no tokenizer."""
    backend: str | None = None
    """The tokenizer of the library ``tokenizers``, as JSON, without truncation and padding; None if it is
    written in Python and can only be used by transformers.
    """
    special_tokens: dict[str, str] = {}
    """The named special tokens, which chat templates refer to."""
    templates: dict[str, str] = {}
    """The chat templates by name; a single one is named ``default``."""


def has_tokenizer(model_dir: Path) -> bool:
    """Return whether a directory has the vocabulary of a tokenizer."""
    return any((model_dir / name).exists() for name in VOCABULARIES) or any(model_dir.glob("*.tiktoken"))


def require_sound(model_dir: Path) -> None:
    """Raise ConfigError where a file of a tokenizer is damaged, which is named."""
    path = model_dir / "tokenizer.json"
    if path.exists():
        raw = read_bytes(path, REMEDY, ConfigError)
        try:
            sound = isinstance(fields := json.loads(raw), dict) and "model" in fields
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"{path} is no tokenizer: {describe_flaw(error, raw)}; {REMEDY}") from error
        if not sound:
            raise ConfigError(f"{path} is no tokenizer: it is no JSON object with a model; {REMEDY}")
    found = {name: _OBJECT.read(model_dir / name) for name in OBJECTS if (model_dir / name).exists()}
    _require_templates(model_dir, found.get("tokenizer_config.json", {}).get("chat_template"))
    for path in (model_dir / "chat_template.jinja", *model_dir.glob("additional_chat_templates/*.jinja")):
        if path.exists():
            try:
                path.read_text("utf-8")
            except (OSError, ValueError) as error:
                raise ConfigError(f"{path} is no chat template: {describe_flaw(error)}; {REMEDY}") from error


def _require_templates(model_dir: Path, templates: Any) -> None:
    for each in templates if isinstance(templates, list) else ():
        named = isinstance(each, dict) and isinstance(each.get("name"), str)
        if not named or not isinstance(each.get("template"), str):
            raise ConfigError(f"{model_dir}: its chat templates are no list of names and templates; {REMEDY}")
