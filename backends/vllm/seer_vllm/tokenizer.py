"""The model's tokenizer without transformers, which would import torch into the scheduler's process."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from seer_core.errors import PromptError

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

__all__ = ["ModelTokenizer"]


class ModelTokenizer:
    """Reads ``tokenizer.json`` and the chat template beside it, when first used."""

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, special tokens as the tokenizer adds them."""
        return list(self._tokenizer.encode(text).ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of a chat, with the model's template and the generation prompt."""
        text = self._template.render(messages=messages, add_generation_prompt=True, **self._special_tokens)
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        return Tokenizer.from_file(str(self._dir / "tokenizer.json"))

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self._dir / "tokenizer_config.json"
        return json.loads(path.read_text()) if path.exists() else {}

    @property
    def _special_tokens(self) -> dict[str, str]:
        """The named special tokens, which chat templates refer to."""
        named = {key: value for key, value in self._config.items() if key.endswith("_token")}
        plain = {key: value["content"] if isinstance(value, dict) else value for key, value in named.items()}
        return {key: value for key, value in plain.items() if isinstance(value, str)}

    @cached_property
    def _template(self) -> Template:
        """The chat template, in the environment transformers gives it."""
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        path = self._dir / "chat_template.jinja"
        source = path.read_text() if path.exists() else self._config.get("chat_template")
        if not isinstance(source, str):
            raise PromptError(f"{self._dir} has no chat template; give prompts as text or token ids")

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = partial(json.dumps, ensure_ascii=False)
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        return environment.from_string(source)
