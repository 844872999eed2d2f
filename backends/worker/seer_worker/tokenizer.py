"""The model's tokenizer and chat template without transformers, whose import takes seconds.

A template is rendered in the environment, and with the variables, that transformers 5 gives it; a test holds
both against each other, template by template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from seer_core.errors import ConfigError, PromptError, SeerError
from seer_core.json_files import JsonFormat, describe_flaw, read_bytes

if TYPE_CHECKING:
    from jinja2 import Template
    from tokenizers import Tokenizer

__all__ = ["ModelTokenizer"]


REMEDY = "copy the model's files anew"

QUESTION, TURN = "question", "turn"
"""Contents of the messages that stand for a chat before messages that are appended."""

_CONFIG = JsonFormat[dict[str, Any]](dict[str, Any], "no tokenizer's configuration", REMEDY, ConfigError)


class ModelTokenizer:
    """Reads ``tokenizer.json`` and the chat template beside it, when first used."""

    def __init__(self, model_dir: Path) -> None:
        self._dir = model_dir

    @property
    def directory(self) -> Path:
        """The directory of the model's files."""
        return self._dir

    def encode(self, text: str) -> list[int]:
        """Return the ids of a plain prompt, special tokens as the tokenizer adds them."""
        return self._encode(text, add_special_tokens=True)

    def encode_part(self, text: str) -> list[int]:
        """Return the ids of a text that stands within another, without special tokens."""
        return self._encode(text, add_special_tokens=False)

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the ids of a chat, with the model's template and the generation prompt.

        ``tools`` of ``template_kwargs`` go to the template for tools, if the model has one of its own.

        Raises:
            PromptError: ``template_kwargs`` has a variable that is given to every template, or the tokenizer
                refuses the text.
        """
        return self._encode(self._rendered(messages, template_kwargs), add_special_tokens=False)

    def encode_reply(
        self,
        messages: Sequence[Mapping[str, Any]],
        written: Sequence[int],
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Return the ids that follow the model's message ``written``: messages and the generation prompt.

        A short chat stands for the one before, so the model's own tokens are not read, and stay as they are.

        Raises:
            PromptError: with the messages, the template writes another text before them, or as
                ``encode_chat``.
        """
        chat = [{"role": "user", "content": QUESTION}, {"role": "assistant", "content": TURN}]
        before = self._rendered(chat, template_kwargs, ends=True)
        whole = self._rendered([*chat, *messages], template_kwargs)
        end = before.rfind(TURN) + len(TURN)
        if TURN not in before or not whole.startswith(before):
            raise PromptError(
                "the chat template writes a message of the assistant's in another way when messages follow,"
                " so none can be appended; let the environment answer text or token ids"
            )
        ids = self._encode(whole[end:], add_special_tokens=False)
        return ids[1:] if ids and ids[:1] == list(written[-1:]) else ids

    def _rendered(
        self,
        messages: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
        *,
        ends: bool = False,
    ) -> str:
        """Return the text of a chat, with the generation prompt unless it ``ends``."""
        own = {"messages": messages, "add_generation_prompt": not ends, **self._special_tokens}
        further = template_kwargs or {}
        if taken := sorted(own.keys() & further.keys()):
            raise PromptError(f"chat_template_kwargs cannot set {', '.join(taken)}; leave them out")
        variables = {"tools": None, "documents": None, **own, **further}
        template = self._tools_template if variables["tools"] else self._template
        return str(template.render(**variables))

    def _encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except SeerError:
            raise
        except Exception as error:  # the library raises no other kind
            raise PromptError(
                f"the tokenizer in {self._dir} refused the text: {describe_flaw(error)}"
            ) from error

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, special tokens left out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=True))

    def decode_all(self, token_ids: Sequence[int]) -> str:
        """Return the text of generated ids, with special tokens."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        from tokenizers import Tokenizer

        path = self._dir / "tokenizer.json"
        raw = read_bytes(path, REMEDY, ConfigError)
        try:
            return Tokenizer.from_buffer(raw)
        # The library raises bare exceptions, and where Rust panics what is no Exception.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ConfigError(f"{path} is no tokenizer: {describe_flaw(error, raw)}; {REMEDY}") from error

    @cached_property
    def _config(self) -> dict[str, Any]:
        path = self._dir / "tokenizer_config.json"
        return _CONFIG.read(path) if path.exists() else {}

    @property
    def _special_tokens(self) -> dict[str, str]:
        """The named special tokens, which chat templates refer to."""
        named = {key: value for key, value in self._config.items() if key.endswith("_token")}
        plain = {
            key: value.get("content") if isinstance(value, dict) else value for key, value in named.items()
        }
        return {key: value for key, value in plain.items() if isinstance(value, str)}

    @cached_property
    def _template(self) -> Template:
        """The chat template, in the environment transformers gives it."""
        return self._compile(self._source(("default",)))

    @cached_property
    def _tools_template(self) -> Template:
        """The chat template for messages with tools: the same, where the model has no other."""
        return self._compile(self._source(("tool_use", "default")))

    def _compile(self, source: str) -> Template:
        from jinja2 import TemplateError
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        from seer_worker.chat_generation import Generation

        def raise_exception(message: str) -> NoReturn:
            raise TemplateError(message)

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, "jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = raise_exception
        environment.globals["strftime_now"] = lambda format: datetime.now().strftime(format)
        try:
            return environment.from_string(source)
        # Jinja raises TemplateSyntaxError, or what Python's own compiler makes of what it generates.
        except Exception as error:
            raise ConfigError(
                f"{self._dir}: its chat template is broken: {describe_flaw(error)}; {REMEDY}"
            ) from error

    def _source(self, names: Sequence[str]) -> str:
        """Return the template; of several named ones the first of these, of which ``default`` is the last."""
        path = self._dir / "chat_template.jinja"
        try:
            source = path.read_text("utf-8") if path.exists() else self._config.get("chat_template")
        except (OSError, ValueError) as error:
            raise ConfigError(f"{path} is no chat template: {describe_flaw(error)}; {REMEDY}") from error
        if isinstance(source, list):
            try:
                named = {each["name"]: each["template"] for each in source}
            except (TypeError, KeyError) as error:
                raise ConfigError(
                    f"{self._dir}: its chat templates are no list of names and templates; {REMEDY}"
                ) from error
            if "default" not in named:
                raise PromptError(
                    f"{self._dir} has chat templates named {', '.join(map(str, named))}, and none named"
                    " default; give prompts as text or token ids"
                )
            source = next(named[name] for name in names if name in named)
        if not isinstance(source, str):
            raise PromptError(f"{self._dir} has no chat template; give prompts as text or token ids")
        return source


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | str | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Write JSON as transformers' filter does, without escaping it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
