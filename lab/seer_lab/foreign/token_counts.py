"""How many tokens a text has: counted by a model's tokenizer, or estimated from its characters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from seer_core.errors import ConfigError

__all__ = ["CHARACTERS", "estimate", "token_counter"]

CHARACTERS = 3
"""Characters of a token, assumed: Tekken's tokens have 4 in prose and code, and 2 in formulas."""


def estimate(text: str) -> int:
    """Return about how many tokens a text has."""
    return -(-len(text) // CHARACTERS)


def token_counter(model_dir: Path) -> Callable[[str], int]:
    """Return a function that counts the tokens of a text by the tokenizer of a directory.

    Raises:
        ConfigError: the library is not installed, or the file is no tokenizer.
    """
    try:
        import transformers  # noqa: F401  # imported late by what comes next
        from seer_worker.tokenizer import ModelTokenizer
    except ImportError as error:
        raise ConfigError(f"--tokenizer needs transformers ({error}); pip install transformers") from error
    tokenizer = ModelTokenizer(model_dir)
    tokenizer.encode_part("")  # so that a bad file is found before anything is read
    return lambda text: len(tokenizer.encode_part(text))
