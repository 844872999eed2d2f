"""Figures of a server, measured as its clients see it: prefill, steps, and whether its KV is shared."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Coroutine
from typing import Any

from msgspec import Struct

from seer_remote.dialect import ServerChunk, ServerFacts

__all__ = ["Ask", "ServerFigures", "fetch", "measure"]

Ask = Callable[[list[int], int], Coroutine[Any, Any, ServerChunk]]
"""Has a server write so many tokens after these."""

LONG_TOKENS = 2048
SHORT_TOKENS = 16
STEPS = 16
"""Decoding steps that are timed."""
TIMES = 2
"""How often each is timed; the shortest counts, for other clients' requests only add to it."""


SETTLE_S = 0.2
"""Connectors may store KV after a request's end."""


class ServerFigures(Struct, frozen=True):
    """The times of a server; 0 where they were too short to measure."""

    prefill_s_per_token: float = 0.0
    step_s: float = 0.0
    """Of one request alone."""
    token_s: float = 0.0
    """From a short prompt to its first token."""


def prompt_of(facts: ServerFacts, tokens: int) -> list[int]:
    """Return a prompt that no cache has."""
    return [secrets.randbelow(facts.vocab_size) for _ in range(tokens)]


def longest(facts: ServerFacts, kv_tokens: int) -> int:
    """Return the tokens of a prompt that is long, and leaves most of a server's KV to its other clients."""
    return max(SHORT_TOKENS, min(LONG_TOKENS, facts.max_model_tokens // 2, kv_tokens // 4))


async def measure(ask: Ask, facts: ServerFacts, kv_tokens: int) -> ServerFigures:
    """Time a server, in less than a second or two; raises what ``ask`` does."""

    async def least(prompt_tokens: int, most: int) -> float:
        found = []
        for _ in range(TIMES):
            prompt = prompt_of(facts, prompt_tokens)
            began_s = time.perf_counter()
            await ask(prompt, most)
            found.append(time.perf_counter() - began_s)
        return min(found)

    long = longest(facts, kv_tokens)
    one_s = await least(SHORT_TOKENS, 1)
    step_s = (await least(SHORT_TOKENS, 1 + STEPS) - one_s) / STEPS
    prefill_s = (await least(long, 1) - one_s) / max(1, long - SHORT_TOKENS)
    return ServerFigures(max(0.0, prefill_s), max(0.0, step_s), one_s)


async def fetch(theirs: Ask, mine: Ask, facts: ServerFacts, kv_tokens: int, token_s: float) -> float | None:
    """Return how long a server takes to find a token's KV that another has written; None if it finds none.

    ``token_s`` is what a short prompt takes.
    """
    prompt = prompt_of(facts, longest(facts, kv_tokens))
    await theirs(prompt, 1)
    await asyncio.sleep(SETTLE_S)
    began_s = time.perf_counter()
    cached = min((await mine(prompt, 1)).cached_tokens, len(prompt))
    took_s = time.perf_counter() - began_s
    return max(0.0, took_s - token_s) / cached if cached > len(prompt) / 2 else None
