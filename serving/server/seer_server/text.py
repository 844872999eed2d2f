"""The text of a response that is streamed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from seer_host.text import GrowingText

from seer_core.model import Sampling

__all__ = ["StreamedText"]


class StreamedText:
    """Returns a response's text piece by piece; what may be the beginning of a stop string waits.

    Args:
        decode: returns the text of tokens; without it there is no text.
        sampling: the request's.
        prompt: the tokens of its prompt.
    """

    def __init__(
        self,
        decode: Callable[[Sequence[int]], str] | None,
        sampling: Sampling | None = None,
        prompt: Sequence[int] = (),
    ) -> None:
        self._growing = None if decode is None else GrowingText(decode, prompt)
        stops = sampling.stop if sampling and not sampling.include_stop_str_in_output else ()
        self._holds = max(map(len, stops), default=1) - 1
        """Characters that wait."""
        self._held = ""
        self._returned: list[str] = []

    def add(self, token_ids: Sequence[int]) -> str:
        """Return the text that is sure with these tokens."""
        if self._growing is None:
            return ""
        text = self._held + self._growing.add(token_ids)
        sure = max(0, len(text) - self._holds)
        self._held, piece = text[sure:], text[:sure]
        self._returned.append(piece)
        return piece

    def rest(self, text: str) -> str:
        """Return what is missing of the whole text; nothing if it is another one than was handed out."""
        returned = "".join(self._returned)
        return text[len(returned) :] if text.startswith(returned) else ""
