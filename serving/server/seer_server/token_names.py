"""The words by which log-probs name tokens: those of vLLM's server."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import attrs
import msgspec
from seer_host.text import REPLACEMENT

from seer_core.ports.engine import Tokenizer

__all__ = ["NamedPlace", "NamesInText", "Pairs", "Place", "TokenNames", "names_of"]

Pairs = Sequence[tuple[int, float]]
Place = tuple[int, float | None, Pairs]
"""A token, its log-prob, and the most probable tokens in its place."""

NamedPlace = tuple[str, float | None, Sequence[tuple[str, float]]]
"""The same by words."""

CONTEXT = 4
"""Tokens before one that is looked at with it: no character has more bytes."""


class _Backend(msgspec.Struct, frozen=True):
    """The part of a tokenizer's file that says how spaces are marked."""

    pre_tokenizer: dict[str, Any] | None = None


@attrs.frozen
class TokenNames:
    """Names single tokens by their text, special ones too.

    ``marked`` tokenizers have a mark for the space before a word (Metaspace), and leave the first space of a
    text out; here each word keeps its own.
    """

    tokenizer: Tokenizer
    marked: bool

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of tokens, with special ones."""
        decode = getattr(self.tokenizer, "decode_all", self.tokenizer.decode)
        return str(decode(token_ids))

    def alone(self, token: int) -> str:
        """Return the text of a token by itself."""
        text = self.decode([token])
        if self.marked:
            behind_itself = self.decode([token, token]).removeprefix(text)
            if len(behind_itself) > len(text) and behind_itself.lstrip(" ") == text.lstrip(" "):
                return behind_itself
        return text

    def after(self, token: int, before: Sequence[int]) -> str:
        """Return the text of a token behind others: a character stands at its last token.

        The tokens that begin it have the empty text.  As ``LogprobsProcessor._correct_decoded_token`` of vLLM
        0.32.
        """
        text = self.alone(token)
        if not text.endswith(REPLACEMENT):
            return text
        for size in range(1, min(len(before), CONTEXT) + 1):
            context = before[-size:]
            full = self.decode([*context, token])
            if full.endswith(REPLACEMENT):
                continue
            while context and self.decode(context[-1:]).endswith(REPLACEMENT):
                context = context[:-1]
            head = self.decode(context) if context else ""
            while not full.startswith(head):
                head = head[:-1]
            return full[len(head) :]
        return ""


def names_of(tokenizer: Tokenizer) -> TokenNames:
    """Return the names of a tokenizer's tokens."""
    hashable: Any = tokenizer
    return _names_of(hashable)


@lru_cache(maxsize=4)
def _names_of(tokenizer: Any) -> TokenNames:
    backend = getattr(getattr(tokenizer, "reading", None), "backend", None)
    if not isinstance(backend, str):
        return TokenNames(tokenizer, marked=False)
    found = msgspec.json.decode(backend, type=_Backend).pre_tokenizer or {}
    kinds = [found.get("type"), *(each.get("type") for each in found.get("pretokenizers", ()))]
    return TokenNames(tokenizer, marked="Metaspace" in kinds)


class NamesInText:
    """Names the tokens of one text, each behind those before it.

    Args:
        names: those of the tokenizer's tokens; without them tokens are named by their ids.
        ids: whether they are named by their ids anyway.
    """

    def __init__(self, names: TokenNames | None, *, ids: bool = False) -> None:
        self._names, self._ids = names, ids or names is None
        self._before: list[int] = []
        self.characters = 0
        """Those of the words so far."""

    def text(self, token: int) -> str | None:
        """Return the text of a token in the next place; None without a tokenizer."""
        return None if self._names is None else self._names.after(token, self._before)

    def word(self, token: int) -> str:
        """Return the word of a token in the next place."""
        text = None if self._ids else self.text(token)
        return f"token_id:{token}" if text is None else text

    def first_word(self, token: int) -> str:
        """Return the word of a prompt's first token, which has no log-prob; vLLM does not look back at it."""
        return f"token_id:{token}" if self._ids or self._names is None else self._names.decode([token])

    def read(self, token: int) -> None:
        """Go on behind a token."""
        self._before = [*self._before[1 - CONTEXT :], token]

    def skip(self, token_ids: Iterable[int]) -> None:
        """Go on behind tokens whose words are not wanted."""
        for token in token_ids:
            self.characters += len(self.word(token))
            self.read(token)

    def named(self, places: Iterable[Place]) -> Iterator[NamedPlace]:
        """Yield places by their words."""
        for token, score, top in places:
            yield self.word(token), score, [(self.word(each), logprob) for each, logprob in top]
            self.read(token)

    def offsets(self, words: Sequence[str]) -> list[int]:
        """Return where these words begin, behind those before them."""
        found = []
        for word in words:
            found.append(self.characters)
            self.characters += len(word)
        return found
