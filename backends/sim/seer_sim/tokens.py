"""What a simulated model says: made-up tokens and log-probs, fixed by (seed, position)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

__all__ = ["EOS_TOKEN_ID", "FIRST_TOKEN_ID", "ByteTokenizer", "generate"]

EOS_TOKEN_ID = 2
FIRST_TOKEN_ID = 3
"""Ids below are special, as in most vocabularies; a prompt's byte b is token 3 + b."""

_MASK = 0xFFFFFFFF
_LOGPROBS = [-(i + 1) / 64 for i in range(256)]


def generate(
    seed: int, start: int, count: int, stopped: bool, vocab_size: int
) -> tuple[list[int], list[float]]:
    """Return ``count`` tokens from absolute position ``start``, and their log-probs in nats.

    Both are invented.  A token is a multiplicative hash (Knuth, TAOCP 6.4) of its position, keyed by
    the seed; the log-prob is looked up by token.  The last token is EOS if the response ``stopped``.
    """
    key = (seed ^ seed >> 32) * 0x9E3779B1 & _MASK
    size = vocab_size - FIRST_TOKEN_ID
    tokens = [
        FIRST_TOKEN_ID + ((key ^ position * 0x85EBCA6B) & _MASK) % size
        for position in range(start, start + count)
    ]
    if stopped:
        tokens[-1] = EOS_TOKEN_ID
    return tokens, [_LOGPROBS[token & 255] for token in tokens]


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
