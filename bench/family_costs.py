"""What does a move cost by family, what is computed again without a pool, and how much KV really fits?

Tiny models of each family, as in the case `models`. Two instances write responses to prompts of 480 tokens,
in chunks that end one token after a block's end, as `divided_rollout` ends them by default. Every chunk
moves with a pool of the machine's memory, or moves without one, or stays. The cost of a move is the processor
time of the engines' processes, less that of chunks that stay: to save the KV, to fetch it, or to compute it
again. An instance keeps what it had of a response two chunks before, so a move fetches the rest. On a GPU
times are others. A second figure is of chunks that stay and end within a block. At last an instance with
2 MiB of KV is filled by eight responses, longer and longer until they no longer run to their ends together.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import sys
import tempfile
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from seer_divided_rollout.splitter import AffordableChunks
from seer_session.runtime import Runtime
from seer_testing.families import FAMILIES, VOCABULARY

from bench.harness import Row, git, markdown, stored_rows
from bench.models import (
    ENGINES,
    LEAST_CHUNK_TOKENS,
    TECHNIQUES,
    TRAINED,
    BlockEnds,
    FamilyRun,
    Texts,
    compared,
    reason,
)
from bench.placers import Stay
from seer_core.errors import SeerError
from seer_core.model import InstanceInfo, InstanceStatus, Request

DEPENDS_ON = ("backends/vllm", "backends/worker", "backends/kv_local", "plugins/divided_rollout", "testing")
ROUNDS = 1
LIMITS = {"max_model_tokens": 2048}
GROUPS, PROMPT_TOKENS, CHUNKS = 3, 480, 4
FILLING, FILLED_BYTES, MOST_TRIES = 8, 2 << 20, 6
"""Responses that fill an instance, its KV, and the lengths tried behind the first."""
LONGEST = {"DeepSeek-V3": 256, "Gemma-4": 640}
"""Lengths that such KV holds, where it does not hold 960 tokens: latent KV, and heads of two sizes."""
UNABLE = ("Nemotron-H", "Falcon-H1")
"""Families that do not start on a CPU."""


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), help="some families alone")


def run(options: argparse.Namespace) -> list[Row]:
    """Measure families, one after the other; other rows stay as they are stored."""
    rows = {row["family"]: row for row in stored_rows(options)}
    for name in options.only or [each for each in TRAINED if each not in UNABLE]:
        with tempfile.TemporaryDirectory() as folder:
            row = asyncio.run(FamilyCosts(ENGINES[0], name, Path(folder), options.set).row())
        rows[name] = row | {"commit": git("rev-parse", "--short=9", "HEAD")}
        print(row, file=sys.stderr, flush=True)
    return [rows[name] for name in FAMILIES if name in rows]


class FamilyCosts(FamilyRun):
    """A family on instances of vLLM, and what they cost."""

    async def row(self) -> Row:
        """Return the figures of a family."""
        found: Row = {"family": self.name}
        async with self.started("none", TECHNIQUES, **LIMITS) as runtime:
            [info, *_] = runtime.alive.values()
            self.block_tokens = max(info.block_tokens, LEAST_CHUNK_TOKENS)
            found |= {
                "block_tokens": info.block_tokens,
                "exactness": info.exactness,
                "chunk_tokens": usual_chunk(info),
            }
            expected = await self.written(runtime, TECHNIQUES, placer=Stay())  # and warm up
            before = cpu_s(runtime)
            texts = await self.written(runtime, TECHNIQUES, placer=Stay())
            stays_s = cpu_s(runtime) - before
            found["kept_ends"] = kept(texts) | {"tokens": compared(expected, texts)}
            before = cpu_s(runtime)
            texts = await self.written(runtime, TECHNIQUES)
            found["without"] = moved(texts, cpu_s(runtime) - before - stays_s) | {
                "tokens": compared(expected, texts)
            }
            splitter = Within(self.block_tokens)
            texts = await self.written(runtime, TECHNIQUES, splitter=splitter, placer=Stay())
            found["kept_within"] = kept(texts) | {"tokens": compared(expected, texts)}
        try:
            async with self.started("local", TECHNIQUES, **LIMITS) as runtime:
                await self.written(runtime, TECHNIQUES)
                assert runtime.kv_pool is not None
                pool = runtime.kv_pool.strategy
                stats, before = pool.stats(), cpu_s(runtime)
                texts = await self.written(runtime, TECHNIQUES)
                found["pooled"] = moved(texts, cpu_s(runtime) - before - stays_s) | {
                    "tokens": compared(expected, texts),
                    "got_bytes": pool.stats().since(stats).got_bytes,
                }
        except SeerError as error:
            found["pooled"] = reason(error)
        return found | await self.fill()

    def records(self) -> list[dict[str, Any]]:
        """Return the prompts, as token ids; every second one is greedy."""
        draw = random.Random(self.name)
        return [
            {
                "prompt_token_ids": draw.choices(range(3, VOCABULARY), k=PROMPT_TOKENS),
                "n": 2,
                "max_tokens": CHUNKS * self.block_tokens,
                "temperature": float(number % 2),
                "ignore_eos": True,
                "group_id": str(number),
                "seed": number,
            }
            for number in range(GROUPS)
        ]

    async def fill(self) -> Row:
        """Return the tokens that an instance says fit, and those that it held at once."""
        longest = LONGEST.get(self.name, 960)
        limits = {"kv_cache_bytes": FILLED_BYTES, "max_model_tokens": longest, "max_running": FILLING}
        async with self.started("none", (), instances=1, **limits) as runtime:
            [info] = runtime.alive.values()
            step = max(info.block_tokens, LEAST_CHUNK_TOKENS)
            length = min(longest, info.kv_capacity_tokens // FILLING) // step * step
            fitting = await self.fits(runtime, length)
            for _ in range(MOST_TRIES):
                further = length + step if fitting else length - step
                if not step <= further <= longest or await self.fits(runtime, further) != fitting:
                    break
                length = further
            held = length if fitting else length - step
        return {
            "reported_tokens": info.kv_capacity_tokens,
            "held_tokens": FILLING * held,
            "slack_tokens": FILLING * step,
        }

    async def fits(self, runtime: Runtime, length: int) -> bool:
        """Return whether responses of this length, their prompts included, run to their ends together."""
        draw = random.Random(length)
        records = [
            {
                "prompt_token_ids": draw.choices(range(3, VOCABULARY), k=length // 2),
                "n": 1,
                "max_tokens": length - length // 2,
                "ignore_eos": True,
                "group_id": f"filling-{number}",
            }
            for number in range(FILLING)
        ]
        texts = await self.written(runtime, records=records)
        return all(len(each.chunks) == 1 and not each.chunks[0].preemptions for each in texts.values())


class Within(BlockEnds):
    """Ends each chunk within a block, whose tokens the next one computes again."""

    def split(self, request: Request) -> int:
        """Return the next chunk's ``max_tokens``."""
        group, generated = request.group, request.generated_tokens
        return min(self.block_tokens * 3 // 4 + 1, group.max_tokens - generated)


def cpu_s(runtime: Runtime) -> float:
    """Return the processor time that the engines' processes have had so far."""
    total = 0
    for engine in runtime._fleet.engines.values():
        worker: Any = engine
        for task in Path(f"/proc/{worker.worker.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def usual_chunk(info: InstanceInfo) -> int:
    """Return how many tokens ``divided_rollout`` gives a first chunk on such an instance by default."""
    splitter = AffordableChunks()
    splitter.instance_started(InstanceStatus(info, 0))
    return splitter.length(0)


def moved(texts: Texts, more_s: float) -> Row:
    """Return the moves of responses, and what each took of processor time."""
    chunks = [each.chunks for each in texts.values()]
    moves = sum(a.instance != b.instance for each in chunks for a, b in pairwise(each))
    return {
        "moves": moves,
        "pool_tokens": sum(chunk.pool_tokens for each in chunks for chunk in each),
        "recomputed_tokens": sum(chunk.recomputed_tokens for each in chunks for chunk in each),
        "move_s": more_s / moves,
    }


def kept(texts: Texts) -> Row:
    """Return how many chunks went on with a response, and how many tokens were computed again for them."""
    chunks = [chunk for each in texts.values() for chunk in each.chunks]
    return {
        "continued": len(chunks) - len(texts),
        "written": sum(chunk.tokens for chunk in chunks),
        "again": sum(chunk.recomputed_tokens for chunk in chunks),
    }


def table(rows: Sequence[Row]) -> str:
    """Return one line for each family."""
    columns = [
        "family",
        "tokens of a block",
        "first chunk, by default",
        "tokens fetched in a move",
        "KiB",
        "ms",
        "ms without a pool",
        "computed again per chunk that stays, ended with a block",
        "within one",
        "tokens of these",
        "tokens that 2 MiB hold, as reported",
        "held",
    ]
    return markdown(columns, [_cells(row) for row in rows])


def _cells(row: Row) -> list[str]:
    pooled = ["refused", "-", "-"]
    if isinstance(row["pooled"], dict):
        each = row["pooled"]
        pooled = [
            f"{each['pool_tokens'] / each['moves']:,.0f}",
            f"{each['got_bytes'] / each['moves'] / 1024:,.0f}",
            _ms(each),
        ]
    ends, within = row["kept_ends"], row["kept_within"]
    return [
        row["family"],
        f"{row['block_tokens']:,}",
        f"{row['chunk_tokens']:,}",
        *pooled,
        _ms(row["without"]),
        *(f"{each['again'] / each['continued']:.1f}" for each in (ends, within)),
        ends["tokens"] if ends["tokens"] == within["tokens"] else f"{ends['tokens']}; {within['tokens']}",
        *(f"{row[name]:,}" if name in row else "-" for name in ("reported_tokens", "held_tokens")),
    ]


def _ms(moves: Row) -> str:
    return f"{1e3 * moves['move_s']:.1f}" if "move_s" in moves else "-"


def answer(rows: Sequence[Row]) -> str:
    """Return what a move fetches, what is computed again, and whether what is reported fits."""
    pooled = [row["pooled"] for row in rows if isinstance(row["pooled"], dict)]
    sizes = [each["got_bytes"] / each["moves"] / 1024 for each in pooled]
    named = [row["family"] for row in rows if isinstance(row["pooled"], dict)]
    differing = " and ".join(
        name for name, each in zip(named, pooled, strict=True) if "differ" in each["tokens"]
    )
    most = max(row["kept_ends"]["again"] / row["kept_ends"]["continued"] for row in rows)
    changed = f", and changed tokens of {differing}" if differing else ""
    text = (
        f"A move of a tiny model's response by a KV pool fetches {min(sizes):.0f} to {max(sizes):.0f} KiB"
        f"{changed}. A chunk that stays, behind one that ended with a block, computes {most:.0f} tokens"
        " again."
    )
    filled = [row for row in rows if "held_tokens" in row]
    if not filled:
        return text
    short = [each for each in filled if each["held_tokens"] < each["reported_tokens"] - each["slack_tokens"]]
    names = ", ".join(each["family"] for each in short)
    return f"{text} The KV that instances report fits{f', but for {names}' if names else ''}."
