"""Tests of servers: on what their tokens depend, and whether two have the same weights.

A request is run whole and in two parts.  Where the parts are the whole, the noise behind a token depends on
the request's seed and the token's place alone.  The test goes on until it has left so much to chance that a
server which draws other noise in the second part would have written other tokens.  Another server then writes
the second parts, too.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import Any

from msgspec import Struct, structs

from seer_core.model import Exactness, Sampling
from seer_remote.connection import Malformed
from seer_remote.dialect import ServerChunk

__all__ = [
    "LEVELS",
    "PROMPT_TOKENS",
    "LevelFinding",
    "Likeness",
    "SecondPart",
    "Write",
    "agrees",
    "chunk_seed",
    "examine",
    "look",
    "reports_raw",
    "seed_of",
    "shape_of",
]

LEVELS: tuple[Exactness, ...] = ("distributed", "reproducible", "exact")
"""The weakest first."""

Write = Callable[[Sampling, Sequence[int], int, int | None], Coroutine[Any, Any, ServerChunk]]
"""Has a server write: sampling, tokens, how many more, seed."""

PROMPT_TOKENS, FIRST_TOKENS, ALL_TOKENS = 17, 13, 40
COMPARED = 8
"""Tokens behind the border of two parts that must be those of the whole.  Later ones may differ on devices
whose arithmetic depends on the batch, as responses of the engine itself do.
"""
SEEDS = tuple(range(12345678901234567, 12345678901234567 + 8 * 987654321, 987654321))
AT_ONCE = 2
"""Seeds that are tested together; the others where these left little to chance."""
LEAST_CHANCE = 15.0
"""Nats of the compared tokens by which other noise would have shown."""
HOT = 2.0
"""The temperature of the test, the highest that vLLM takes."""
PROCESSED = 0.05
"""Nats by which log-probs differ where they are not of one distribution."""
PLAIN = Sampling()
ENDS = (
    "stop_token_ids",
    "ignore_eos",
    "min_tokens",
    "top_logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
)
"""Fields that change neither which tokens are drawn nor how."""
LEAST_TOLERANCE = 1e-3
"""Of log-probs, in nats."""
NOISE = 20.0
"""Log-probs of the same weights differ by no more than so often what they differ by on one server."""


class SecondPart(Struct, frozen=True):
    """A seed and a context, and the tokens with which a server went on."""

    seed: int
    context: list[int]
    token_ids: list[int]


class LevelFinding(Struct, frozen=True):
    """A server's level for a sampling, and by how much the log-probs of its two ways differed, in nats.

    With the second parts of its responses, and the sampling that they were written with.
    """

    level: Exactness
    noise: float
    sampling: Sampling
    parts: list[SecondPart] = []


class Likeness(Struct, frozen=True):
    """The marks of a server's weights: what it writes without chance, and the label that it gives them."""

    url: str
    tokens: list[int]
    logprobs: list[float]
    label: str
    noise: float

    def flaw(self, other: Likeness) -> str:
        """Return why these weights are not the other server's; empty if they may be."""
        if self.label != other.label:
            before = "served" if other.url == self.url else f"{other.url} serves"
            return f"{self.url} serves weights {self.label!r}, and {before} {other.label!r}"
        tolerance = max(LEAST_TOLERANCE, NOISE * max(self.noise, other.noise))
        for place, (mine, theirs) in enumerate(zip(self.logprobs, other.logprobs, strict=False)):
            if abs(mine - theirs) > tolerance:
                return (
                    f"{self.url} and {other.url} serve other weights or other models: token {place} of a"
                    f" greedy response has log-prob {mine:.4f} and {theirs:.4f}"
                )
            if self.tokens[place] != other.tokens[place]:  # two that are as probable
                break
        return ""


def chunk_seed(seed: int, position: int) -> int:
    """Return a 63-bit seed for the chunk that begins at a position, by SplitMix64 (Steele et al. 2014)."""
    z = (seed + (position + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (z ^ (z >> 31)) >> 1


def seed_of(level: Exactness, seed: int, position: int) -> int | None:
    """Return the seed that a chunk is sent with."""
    match level:
        case "exact":
            return seed
        case "reproducible":
            return chunk_seed(seed, position)
        case "distributed":
            return None


def shape_of(sampling: Sampling, whole_controls: Collection[str] = ()) -> str:
    """Return what of a sampling decides which way a server samples: the fields that are set.

    Those that hold within one request alone do not, for a response under them is not divided.
    """
    cuts = {"temperature": not sampling.temperature, "top_p": sampling.top_p < 1, "top_k": sampling.top_k > 0}
    ends = {*ENDS, *whole_controls}
    return " ".join(
        [
            *(name for name, set_ in cuts.items() if set_),
            *(each for each in sampling.controls if each not in ends),
        ]
    )


def _prompt(vocab_size: int) -> list[int]:
    return [(3 + place * 5) % vocab_size for place in range(PROMPT_TOKENS)]


async def examine(
    write: Write, vocab_size: int, sampling: Sampling, whole_controls: Collection[str] = ()
) -> LevelFinding:
    """Test a server's level for a sampling; raises what ``write`` does, and Malformed."""
    hot = structs.replace(
        sampling,
        **{name: getattr(PLAIN, name) for name in whole_controls},
        temperature=HOT if sampling.temperature else 0.0,
        stop_token_ids=(),
        ignore_eos=True,
        min_tokens=0,
        top_logprobs=0,
        prompt_logprobs=None,
    )
    prompt = _prompt(vocab_size)

    parts: list[SecondPart] = []

    async def one(seed: int) -> tuple[bool, bool, float, float]:
        whole, first = await asyncio.gather(
            write(hot, prompt, ALL_TOKENS, seed), write(hot, prompt, FIRST_TOKENS, seed)
        )
        context = [*prompt, *first.token_ids]
        rest = await write(hot, context, ALL_TOKENS - FIRST_TOKENS, seed)
        parts.append(SecondPart(seed, context, rest.token_ids[:COMPARED]))
        repeats = first.token_ids == whole.token_ids[:FIRST_TOKENS]
        border = FIRST_TOKENS + COMPARED
        goes_on = repeats and rest.token_ids[:COMPARED] == whole.token_ids[FIRST_TOKENS:border]
        compared = zip(whole.logprobs[:border], [*first.logprobs, *rest.logprobs], strict=False)
        noise = max(abs(a - b) for a, b in compared) if goes_on else 0.0
        return repeats, goes_on, noise, -sum(whole.logprobs[FIRST_TOKENS:border])

    found: list[tuple[bool, bool, float, float]] = []
    for start in range(0, len(SEEDS), AT_ONCE):
        found += await asyncio.gather(*map(one, SEEDS[start : start + AT_ONCE]))
        if not all(goes_on for _, goes_on, *_ in found) or sum(each[-1] for each in found) > LEAST_CHANCE:
            break
    if all(goes_on for _, goes_on, *_ in found):
        return LevelFinding("exact", max(noise for *_, noise, _ in found), hot, parts)
    level: Exactness = "reproducible" if all(repeats for repeats, *_ in found) else "distributed"
    return LevelFinding(level, 0.0, hot)


async def agrees(write: Write, finding: LevelFinding) -> bool:
    """Return whether this server goes on with another's responses as that did; raises as ``examine``."""

    async def one(part: SecondPart) -> bool:
        rest = await write(finding.sampling, part.context, COMPARED, part.seed)
        return rest.token_ids == part.token_ids

    return all(await asyncio.gather(*map(one, finding.parts)))


async def reports_raw(write: Write, vocab_size: int) -> bool:
    """Return whether a server reports log-probs of the model's own distribution.

    The most probable tokens have them; so they do where heat and a cut leave nothing else to choose.
    """
    prompt = _prompt(vocab_size)
    plain, cut = await asyncio.gather(
        write(structs.replace(PLAIN, temperature=0.0, ignore_eos=True), prompt, FIRST_TOKENS, 0),
        write(structs.replace(PLAIN, temperature=HOT, top_k=1, ignore_eos=True), prompt, FIRST_TOKENS, 0),
    )
    for place, token in enumerate(plain.token_ids):
        if cut.token_ids[place] != token:  # two that are as probable
            break
        if abs(plain.logprobs[place] - cut.logprobs[place]) > PROCESSED:
            return False
    return True


async def look(write: Write, vocab_size: int, url: str, noise: float) -> Likeness:
    """Return the marks of a server's weights."""
    greedy = Sampling(0.0, ignore_eos=True)
    written = await write(greedy, _prompt(vocab_size), 24, 0)
    labels = set(written.versions)
    if len(labels) > 1:
        raise Malformed(f"weights {' and '.join(map(repr, sorted(labels)))} wrote one response")
    return Likeness(url, written.token_ids, written.logprobs, "".join(labels), noise)
