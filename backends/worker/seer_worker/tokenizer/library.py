"""Reads a tokenizer by transformers, whose import takes seconds and brings PyTorch along."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import structlog
from msgspec import structs

from seer_core.error_origin import one_line
from seer_core.errors import ConfigError
from seer_worker.tokenizer.reading import REMEDY, TokenizerReading, has_tokenizer, require_sound
from seer_worker.tokenizer.templates import ChatTemplates

if TYPE_CHECKING:
    from tokenizers import Tokenizer

__all__ = ["LibraryTokenizer", "read"]

T = TypeVar("T")

log = structlog.get_logger("seer")

TEXTS = (
    "How far is the moon?  What is 2 + 2?\n\n\tAnswer: 4, or 1234567890.",
    " leading and trailing spaces  ",
    "def f(x):\n    return x * 2  # forty-two",
    "Grüße aus Köln, 世界 你好 мир 😀 e\u0301 \u2028 \u0000",
    "<think>so</think> <tool_call>{}</tool_call> <|im_end|> </s> <eos>",
    "",
)
"""Texts of many kinds, of which a reading must make the same tokens as transformers."""

CHAT = (
    {"role": "user", "content": " How far is the moon? "},
    {"role": "assistant", "content": "384,400 km"},
    {"role": "user", "content": "And the sun?"},
)
TOOL = {"type": "function", "function": {"name": "f", "description": "<f>", "parameters": {"type": "object"}}}


class LibraryTokenizer:
    """The tokenizer of a directory in transformers' own hands."""

    def __init__(self, model_dir: Path, trust_remote_code: bool) -> None:
        """Load it; ``trust_remote_code`` lets it run code of the directory.

        Raises:
            ConfigError: transformers cannot read it, or is not installed.
        """
        try:
            from transformers import AutoTokenizer
        except ImportError as error:
            raise ConfigError(
                f"the tokenizer in {model_dir} is read by transformers, which is not here: {error};"
                " install it, or give prompts as token ids"
            ) from error
        options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
        try:
            self.own: Any = AutoTokenizer.from_pretrained(model_dir, **options)
        # Libraries raise any exception at a damaged file, and where Rust panics what is no Exception.
        except BaseException as error:
            if isinstance(error, KeyboardInterrupt | SystemExit):
                raise
            raise ConfigError(_flaw(model_dir, error)) from error

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        """Return the ids of a text."""
        return list(self.own(text, add_special_tokens=add_special_tokens).input_ids)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> list[int]:
        """Return the ids of a chat with the generation prompt."""
        options = {"add_generation_prompt": True, "tokenize": True, "return_dict": False}
        return list(self.own.apply_chat_template(list(messages), **options, **variables))

    def render(self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]) -> str:
        """Return the text of a chat with the generation prompt."""
        options = {"add_generation_prompt": True, "tokenize": False}
        return str(self.own.apply_chat_template(list(messages), **options, **variables))

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool) -> str:
        """Return the text of ids."""
        return str(self.own.decode(list(token_ids), skip_special_tokens=skip_special_tokens))


def read(model_dir: Path, trust_remote_code: bool = False, textual: bool = True) -> TokenizerReading:
    """Read a model's tokenizer and its end tokens, or the latter alone unless it is ``textual``.

    Raises:
        ConfigError: a file is damaged, or transformers cannot read it, or is not installed.
    """
    require_sound(model_dir)
    if not textual:
        return TokenizerReading(_end_tokens(model_dir, None, trust_remote_code))
    if not has_tokenizer(model_dir):
        raise ConfigError(f"{model_dir} has no tokenizer, such as tokenizer.json; {REMEDY}")
    tokenizer = LibraryTokenizer(model_dir, trust_remote_code)
    own = tokenizer.own
    templates = own.chat_template or {}
    reading = TokenizerReading(
        end_token_ids=_end_tokens(model_dir, own.eos_token_id, trust_remote_code),
        kind=type(own).__name__,
        backend=_backend_of(own),
        special_tokens=dict(getattr(own, "special_tokens_map", {})),
        templates={"default": templates} if isinstance(templates, str) else dict(templates),
    )
    if flaw := _other_chats(tokenizer, reading):
        reading = structs.replace(reading, templates={}, backend=None)
    elif flaw := _other_tokens(tokenizer, reading):
        reading = structs.replace(reading, backend=None)
    if flaw:
        log.info("tokenizer_in_python", model=str(model_dir), kind=reading.kind, reason=flaw)
    return reading


def _flaw(model_dir: Path, error: BaseException) -> str:
    text = one_line(error)
    if "trust_remote_code" in text:
        return (
            f"the tokenizer in {model_dir} is code that came with the model; to run it, set"
            " trust_remote_code = true in engine_args of the engine's table"
        )
    return f"{model_dir} has no tokenizer that transformers can read: {text}; {REMEDY}"


def _backend_of(own: Any) -> str | None:
    """Return the tokenizer of the library ``tokenizers`` that works within, without its limits of length."""
    backend = getattr(own, "backend_tokenizer", None)
    if backend is None:
        return None
    backend.no_truncation()  # which transformers sets anew at each call
    backend.no_padding()
    return str(backend.to_str())


def _other_tokens(tokenizer: LibraryTokenizer, reading: TokenizerReading) -> str | None:
    """Return where a reading makes other tokens than transformers; None if it does nowhere."""
    if reading.backend is None:
        return "it has no backend of the library tokenizers"
    backend = tokenizer.own.backend_tokenizer
    for text in TEXTS:
        for special in (True, False):
            theirs = _result(partial(tokenizer.encode, text, special))
            ours = _result(partial(_encode, backend, text, special))
            if theirs != ours:
                return f"it encodes {text!r} in another way"
    return None


def _other_chats(tokenizer: LibraryTokenizer, reading: TokenizerReading) -> str | None:
    """Return where a reading makes another text of a chat than transformers; None if it does nowhere."""
    templates = ChatTemplates(reading, tokenizer.own.name_or_path)
    for messages in (CHAT[:1], CHAT):
        for variables in ({}, {"tools": [TOOL]}):
            rendered = _result(partial(tokenizer.render, messages, variables))
            own = _result(partial(templates.render, messages, variables))
            if rendered != own:
                return f"it renders a chat as {rendered!r}, not as {own!r}"
    return None


def _encode(backend: Tokenizer, text: str, add_special_tokens: bool) -> list[int]:
    return list(backend.encode(text, add_special_tokens=add_special_tokens).ids)


def _result(call: Callable[[], T]) -> T | None:
    """Return what a call returns; None where the tokenizer, or a template, refuses."""
    try:
        return call()
    except Exception:  # anything may come of them
        return None


def _end_tokens(model_dir: Path, eos_token_id: Any, trust_remote_code: bool) -> tuple[int, ...]:
    """Return the tokens that end a response: the tokenizer's, and those of the generation's configuration.

    Without ``generation_config.json`` the model's configuration is taken, as vLLM 0.32 does in
    ``vllm.transformers_utils.config.try_get_generation_config``, with what its class has by default.
    """
    found = {eos_token_id} if isinstance(eos_token_id, int) else set()
    configured = _configured_ends(model_dir, trust_remote_code)
    found.update(configured if isinstance(configured, list) else [configured])
    return tuple(sorted(each for each in found if isinstance(each, int)))


def _configured_ends(model_dir: Path, trust_remote_code: bool) -> Any:
    if (model_dir / "generation_config.json").exists():
        return json.loads((model_dir / "generation_config.json").read_bytes()).get("eos_token_id")
    try:
        from transformers import AutoConfig, GenerationConfig

        config = AutoConfig.from_pretrained(
            model_dir, trust_remote_code=trust_remote_code, local_files_only=True
        )
        return GenerationConfig.from_model_config(config).eos_token_id
    except Exception:  # a kind of model that transformers has not, or vLLM alone
        path = model_dir / "config.json"
        config = json.loads(path.read_bytes()) if path.exists() else {}
        ids = config.get("eos_token_id")
        return ids if ids is not None else (config.get("text_config") or {}).get("eos_token_id")
