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

Decode = Callable[[Sequence[int]], str]


def context_of(decode: Decode, prompt: Sequence[int]) -> Sequence[int]:
    """Return the last tokens of a prompt, with which its response is decoded."""
    for size in CONTEXT_TOKENS:
        context = prompt[-size:]
        if len(prompt) <= size or REPLACEMENT not in decode(context):
            return context
    return prompt[-CONTEXT_TOKENS.stop :]


class GrowingText:
    """Decodes what is new, after the piece before it.

    Bytes that are no whole character yet wait for the tokens that bring the rest.  Where bytes are no text at
    all, some tokenizers replace them in another way once more follow; what was handed out stays.

    Args:
        decode: returns the text of tokens.
        prompt: the tokens before the first that is added.
    """

    def __init__(self, decode: Decode, prompt: Sequence[int] = ()) -> None:
        self._decode = decode
        self._tokens = list(context_of(decode, prompt))
        """From the end of the last but one piece that ended with a character."""
        self._cut = len(self._tokens)
        """How many of them are the last such piece."""
        self._returned = len(decode(self._tokens).rstrip(REPLACEMENT)) if self._tokens else 0
        """Characters of theirs that were returned."""

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens add, as far as its characters are whole."""
        self._tokens += token_ids
        text = self._decode(self._tokens)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[self._returned :]
        self._returned += len(piece)
        if piece and whole == text:
            del self._tokens[: self._cut]
            self._cut = len(self._tokens)
            self._returned = len(self._decode(self._tokens))
        return piece


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
        before = _added(decode, prompt, token_ids[:-1]).rstrip(REPLACEMENT)
        found = find_stop(before, text[len(before) :], sampling.stop) if text.startswith(before) else None
        if found is not None:
            reason, start = found
            text = text[: start + len(found[0]) if sampling.include_stop_str_in_output else start]
    return ResponseText(text, reason)


def _added(decode: Decode, prompt: Sequence[int], token_ids: Sequence[int]) -> str:
    """Return what the response adds to its prompt's text; a simulated response is not read for it."""
    if not isinstance(token_ids, Tokens):
        return decode(token_ids)
    context = context_of(decode, prompt)
    head, text = decode(context).rstrip(REPLACEMENT), decode([*context, *token_ids])
    return text[len(head) :] if text.startswith(head) else decode(token_ids)
