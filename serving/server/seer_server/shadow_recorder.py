"""A record of requests that are passed on untouched: their lengths and times, for ``seer shadow``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from hashlib import blake2b
from pathlib import Path
from typing import Any

import attrs
import msgspec
import structlog
from seer_host.shadow_records import WatchedRequest, append_watched

__all__ = ["ShadowRecorder"]

log = structlog.get_logger("seer")

LARGEST = 64 << 20
"""Bytes of an answer beyond which it is not read; it is passed on all the same."""


@attrs.define(eq=False)
class ShadowRecorder:
    """Writes a line for each request that a server has answered whole, in the forms of vLLM and SGLang.

    ``changed`` begins a step: the owner has changed weights, paused servers or put them to sleep.
    """

    path: Path
    step: int = 0
    _begun: bool = False

    def changed(self) -> None:
        """Count requests from now on to another step, if there were any."""
        self.step += self._begun
        self._begun = False

    async def pieces(self, asked: bytes, server: str, answer: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield an answer's pieces as they come, and note the request in the end."""
        began_s, kept = time.time(), bytearray()
        step = self.step
        async for piece in answer:
            if len(kept) < LARGEST:
                kept += piece
            yield piece
        for prompt, prompt_tokens, tokens in lengths_of(asked, bytes(kept)):
            self._begun = True
            request = WatchedRequest(step, prompt, server, prompt_tokens, tokens, began_s, time.time())
            try:
                append_watched(self.path, request)
            except OSError as error:
                log.error("request_not_noted", file=str(self.path), error=str(error))


def lengths_of(asked: bytes, answer: bytes) -> list[tuple[str, int, int]]:
    """Return a name of the prompt and the tokens of prompt and response, of each response of an answer.

    It is empty where the answer has none, or is a stream.
    """
    try:
        request, answers = msgspec.json.decode(asked), msgspec.json.decode(answer)
        prompt = next(request[name] for name in PROMPTS if request.get(name) is not None)
        name = blake2b(msgspec.json.encode(prompt), digest_size=6).hexdigest()
        found = answers if isinstance(answers, list) else [answers]
        return [(name, *counts) for each in found for counts in _counts(each, prompt)]
    except (
        msgspec.DecodeError,
        ValueError,
        RecursionError,
        LookupError,
        TypeError,
        StopIteration,
        AttributeError,
    ):
        return []


PROMPTS = ("token_ids", "input_ids", "prompt", "messages", "text", "input")
"""Fields of requests that have the prompt."""


def _counts(answer: dict[str, Any], prompt: Any) -> list[tuple[int, int]]:
    if "meta_info" in answer:  # SGLang's own
        meta = answer["meta_info"]
        return [(meta["prompt_tokens"], meta["completion_tokens"])]
    choices, usage = answer["choices"], answer.get("usage") or {}
    written = [len(each["token_ids"]) for each in choices if each.get("token_ids") is not None]
    if len(written) < len(choices):  # OpenAI's: shared out, since only their sum is there
        written = [usage["completion_tokens"] // len(choices)] * len(choices)
    mine = usage.get("prompt_tokens") or (len(prompt) if isinstance(prompt, list) else 1)
    return [(mine, each) for each in written]
