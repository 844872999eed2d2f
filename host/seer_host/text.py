"""The text of a response, and the stop string at which it ends.

A tokenizer may write a token in another way at the beginning of a text: some leave out the space before the
first word.  So a response's text is what it adds to the last tokens of its prompt, as in vLLM.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from seer_core.model.arrays import Tokens
from seer_core.model.sampling import Sampling

__all__ = ["CONTEXT_TOKENS", "REPLACEMENT", "GrowingText", "ResponseText", "find_stop", "text_before_stop"]

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Stands in a decoded text for bytes that are no character."""

CONTEXT_TOKENS = range(4, 24)
"""How many tokens of a prompt are decoded with its response: as few as end with a whole character."""

SLICE_TOKENS = 64
"""How many tokens are decoded at a time."""

MOST_PENDING = 256
"""So many tokens wait for a whole character; bytes that are none by then never become one."""

Decode = Callable[[Sequence[int]], str]


def context_of(decode: Decode, prompt: Sequence[int]) -> Sequence[int]:
    """Return the last tokens of a prompt, with which its response is decoded."""
    for size in CONTEXT_TOKENS:
        context = prompt[-size:]
        if len(prompt) <= size or REPLACEMENT not in decode(context):
            return context
    return prompt[-CONTEXT_TOKENS.stop :]


class GrowingText:
    """Decodes what is new, after the piece before it; pieces make the same text wherever the tokens are cut.

    Bytes that are no whole character yet wait for the tokens that bring the rest.  Where bytes are no text at
    all, some tokenizers write the characters before them in another way; here these stay as they were.

    Args:
        decode: returns the text of tokens.
        prompt: the tokens before the first that is added.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._head: list[int] = []
        """The tokens of the last piece that ended with a whole character."""
        self._head_text = ""
        self._pending: list[int] = []
        """The tokens after them."""
        self._returned = 0
        """Characters of the pending text that were returned."""
        self._of_prompt = ""
        """The pending text that the prompt has begun."""
        if context := context_of(decode, prompt):
            self.add(context)
            self._of_prompt, self._returned = self._pending_text(), 0

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, as far as its characters are whole."""
        slices = range(0, len(token_ids), SLICE_TOKENS)
        return "".join([self._add(token_ids[start : start + SLICE_TOKENS]) for start in slices])

    def rest(self) -> str:
        """Return the text that still waits: bytes that have become no character."""
        text = self._pending_text()
        return text[self._start(text) :]

    def _add(self, token_ids: Sequence[int]) -> str:
        before = len(self._pending)
        self._pending += token_ids
        text = self._pending_text()
        if REPLACEMENT not in text and len(self._pending) < MOST_PENDING:
            return self._take(text)
        # One token after the other: a character that was whole in between stays.
        del self._pending[before:]
        pieces = []
        for token in token_ids:
            self._pending.append(token)
            pieces.append(self._take(self._pending_text()))
        return "".join(pieces)

    def _take(self, text: str) -> str:
        """Return what is new and whole in the pending text; where all of it is whole, it becomes the head."""
        start, full = self._start(text), len(self._pending) >= MOST_PENDING
        whole = text if full else text.rstrip(REPLACEMENT)
        piece = whole[start:]
        if piece:
            self._returned = start + len(piece)
        if (piece and whole == text) or full:
            if text:
                self._head, self._head_text = self._pending, self._decode(self._pending)
            self._pending, self._returned, self._of_prompt = [], 0, ""
        return piece

    def _start(self, text: str) -> int:
        """Return where in the pending text that begins which is neither returned nor the prompt's."""
        return max(self._returned, _common(self._of_prompt, text))

    def _pending_text(self) -> str:
        text = self._decode([*self._head, *self._pending])
        if text.startswith(self._head_text):
            return text[len(self._head_text) :]
        return self._decode(self._pending)  # with them the head would have another text than was returned


def _common(first: str, second: str) -> int:
    """Return how many characters two texts have in common at their beginnings."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(first), len(second)))


def find_stop(before: str, new: str, stops: Sequence[str]) -> tuple[str, int] | None:
    """Return the stop string that is complete first in ``new``, and where it begins in ``before + new``.

    Of those that are complete at the same place, it is the first in the list, as in vLLM.
    """
    text, found, first_end = before + new, None, len(before) + len(new) + 1
    for stop in stops:
        start = text.find(stop, max(0, len(before) - len(stop) + 1))
        if start >= 0 and start + len(stop) < first_end:
            found, first_end = (stop, start), start + len(stop)
    return found


@attrs.frozen
class ResponseText:
    """The text of a whole response; ``stop_reason`` is the stop string or the stop token at which it ends."""

    text: str | None
    stop_reason: str | int | None = None


def text_before_stop(
    decode: Decode | None, sampling: Sampling, prompt: Sequence[int], token_ids: Sequence[int], stopped: bool
) -> ResponseText:
    """Return the text of a response.

    Args:
        decode: returns the text of tokens; None where there is no tokenizer.
        sampling: the request's.
        prompt: the tokens of its prompt.
        token_ids: those of the response.
        stopped: whether something else than its limit has ended it.
    """
    reason: str | int | None = None
    if stopped and token_ids and token_ids[-1] in sampling.stop_token_ids:
        reason = token_ids[-1]
    if decode is None:
        return ResponseText(None, reason)
    if reason is not None and not sampling.include_stop_str_in_output:
        return ResponseText(_added(decode, prompt, token_ids[:-1]), reason)
    text = _added(decode, prompt, token_ids)
    if stopped and sampling.stop and reason is None:
        before = _added(decode, prompt, token_ids[:-1], whole=False)
        found = find_stop(before, text[len(before) :], sampling.stop) if text.startswith(before) else None
        if found is not None:
            reason, start = found
            text = text[: start + len(found[0]) if sampling.include_stop_str_in_output else start]
    return ResponseText(text, reason)


def _added(decode: Decode, prompt: Sequence[int], token_ids: Sequence[int], *, whole: bool = True) -> str:
    """Return what the response adds to its prompt's text; a simulated response is not read for it.

    Unless it is ``whole``, it ends with its last whole character.
    """
    if not isinstance(token_ids, Tokens):
        return decode(token_ids)
    context = context_of(decode, prompt)
    head, text = decode(context), decode([*context, *token_ids])
    if REPLACEMENT not in text and text.startswith(head):
        return text[len(head) :]
    growing = GrowingText(decode, prompt)
    return growing.add(token_ids) + (growing.rest() if whole else "")
