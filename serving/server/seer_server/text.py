"""Text of a response while it grows, piece by piece."""

from __future__ import annotations

from collections.abc import Sequence

from seer_core.ports.engine import Tokenizer

__all__ = ["REPLACEMENT", "GrowingText"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


class GrowingText:
    """Decodes what is new, after the piece before it: a tokenizer may write the first word in another way.

    Bytes that are no whole character yet wait for the tokens that bring the rest.  Where bytes are no text at
    all, some tokenizers replace them in another way once more follow; what was handed out stays.
    """

    def __init__(self, tokenizer: Tokenizer | None) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # from the end of the last but one piece that ended with a character
        self._cut = 0  # how many of them are the last such piece
        self._returned = 0  # characters of theirs that were returned
        self._text: list[str] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, as far as its characters are whole."""
        if self._tokenizer is None:
            return ""
        self._tokens += token_ids
        text = self._tokenizer.decode(self._tokens)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._returned :]
        self._returned += len(piece)
        if piece and whole == text:
            del self._tokens[: self._cut]
            self._cut = len(self._tokens)
            self._returned = len(self._tokenizer.decode(self._tokens))
        self._text.append(piece)
        return piece

    def rest(self, text: str) -> str:
        """Return what is missing of the whole text; nothing if it is another one than was handed out."""
        returned = "".join(self._text)
        return text[len(returned) :] if text.startswith(returned) else ""
