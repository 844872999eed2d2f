"""The parsers of calls and reasoning that the engines installed here bring."""

from __future__ import annotations

from importlib.util import find_spec

from seer_core.errors import ConfigError
from seer_core.ports.engine import Tokenizer
from seer_server.parsing import ChatParsers, ParserNames, TokenizerOfFiles

__all__ = ["find_parsers"]


def find_parsers(names: ParserNames, tokenizer: Tokenizer | None) -> ChatParsers | None:
    """Return the parsers of these names: vLLM's where it is installed, or else SGLang's; None without names.

    Raises:
        ConfigError: there is no such parser, it does not fit the model, or neither engine is installed here.
    """
    if names == ParserNames():
        return None
    if not isinstance(tokenizer, TokenizerOfFiles):
        raise ConfigError(
            "--tool-call-parser and --reasoning-parser read the text of a model, and this engine has none;"
            " leave them out"
        )
    if find_spec("vllm") is not None:
        from seer_server.vllm_parsers import VLLMParsers

        return VLLMParsers(names, tokenizer.directory)
    if find_spec("sglang") is not None:
        from seer_server.sglang_parsers import SGLangParsers

        return SGLangParsers(names, tokenizer.directory)
    raise ConfigError(
        "--tool-call-parser and --reasoning-parser name parsers of vLLM or SGLang, and neither is installed"
        " beside the server; install one"
    )
