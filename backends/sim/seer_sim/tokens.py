"""What a simulated model says: made-up tokens and log-probs, fixed by (seed, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EOS_TOKEN_ID", "FIRST_TOKEN_ID", "ByteTokenizer", "generate"]

EOS_TOKEN_ID = 2
FIRST_TOKEN_ID = 3
"""Ids below are special, as in most vocabularies; a prompt's byte b is token 3 + b."""

_LOGPROBS = [-(i + 1) / 64 for i in range(256)]


def generate(
    seed: int, start: int, count: int, stopped: bool, vocab_size: int
) -> tuple[list[int], list[float]]:
    """Return ``count`` tokens from absolute position ``start``, and their log-probs in nats.

    Both are invented: ids count upwards through the vocabulary, from one that the seed decides, and
    log-probs repeat a table; so they cost no loop.  The last token is EOS if the response ``stopped``.
    """
    size = vocab_size - FIRST_TOKEN_ID
    first = (seed * 0x9E3779B97F4A7C15 >> 24) % size + start
    tokens: list[int] = []
    while len(tokens) < count:
        token = (first + len(tokens)) % size + FIRST_TOKEN_ID
        tokens += range(token, min(vocab_size, token + count - len(tokens)))
    if stopped:
        tokens[-1] = EOS_TOKEN_ID
    phase = first % len(_LOGPROBS)
    rounds = 1 + (phase + count) // len(_LOGPROBS)
    return tokens, (_LOGPROBS * rounds)[phase : phase + count]


class ByteTokenizer:
    """Text to bytes and ids to digits, so that text prompts work without a vocabulary."""

    def encode(self, text: str) -> list[int]:
        """Return one id per UTF-8 byte."""
        return [FIRST_TOKEN_ID + byte for byte in text.encode()]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Return the ids of ``role: content`` lines and the generation prompt."""
        lines = [f"{message['role']}: {message['content']}\n" for message in messages]
        return self.encode("".join(lines) + "assistant: ")

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the ids as numbers, special ones left out."""
        return " ".join(str(token) for token in token_ids if token >= FIRST_TOKEN_ID)
