"""What do KV pools cost and gain: a block, a request that moves, and whole rollouts?

store    put, look up and get alone, by two processes of one host, a request's blocks a call
move     the next token of a request of so many tokens, on an instance that never saw it: with its KV from the
         pool, and prefilled again; and on the instance that has it; so, from which length on moving wins
rollout  the tiny reasoner's prompts in chunks of --chunk tokens on two instances: never moving, and every
         chunk on another instance than the one before, with each pool and with none
larger   responses in turn, a chunk each, whose KV all together is several times the engines': prefilled
         again, from a pool of a quarter of it in memory, and from one with a disk tier below

Medians [least, most] of the rounds of calls, or of --rollouts rollouts.
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import multiprocessing
import random
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from typing import Any

import attrs
import numpy as np

from bench.frame import EXAMPLE, Row, cell, markdown, spread_of
from bench.kv_rollouts import config_of, larger_ways, rollout_ways, rollouts
from seer_core.model import Sampling
from seer_core.model.events import InstanceDegraded, InstanceReported
from seer_core.plugins.config import load_config
from seer_core.plugins.loading import assemble
from seer_core.ports.engine import ChunkJob, ChunkOutput
from seer_core.ports.kv import KVStore, StoreContext, StoreSpec
from seer_core.runtime.runtime import Runtime

ROOMS = (
    "seer_core",
    "backends/worker",
    "backends/kv_local",
    "backends/mooncake",
    "backends/vllm",
    "backends/sglang",
)
ROUNDS = 7

PARTS = ("store", "move", "rollout", "larger")
BLOCKS = {"tiny reasoner": (65_536, 32), "8B, bfloat16": (2_097_152, 16)}
"""Bytes and tokens of a block."""


# The store alone.


async def store(options: argparse.Namespace, name: str) -> list[Row]:
    """Put in another process, get in this one."""
    rows = []
    for block, (block_bytes, block_tokens) in BLOCKS.items():
        for context in options.contexts:
            count = context // block_tokens
            room = max(1 << 30, 8 * count * block_bytes)  # several requests: not every pool drops at once
            pool = [f"seer.kv_pool={name}", f"kv_pool.{name}.capacity_bytes={room}"]
            slot = assemble(load_config(EXAMPLE / "demo.toml", [*pool, *options.set])).kv_pool
            assert slot is not None
            await slot.strategy.start(["a", "b"])
            try:
                taken = await asyncio.to_thread(
                    _put_and_get, slot.strategy.store, block_bytes, block_tokens, count, options.rounds
                )
            finally:
                await slot.strategy.stop()
            for what, seconds in taken.items():
                row = {
                    "part": "store",
                    "pool": name,
                    "block": block,
                    "block_bytes": block_bytes,
                    "context_tokens": context,
                    "what": what,
                    "request_us": spread_of(each * 1e6 for each in seconds),
                    "block_us": spread_of(each * 1e6 / count for each in seconds),
                    "gb_per_s": spread_of(count * block_bytes / each / 1e9 for each in seconds),
                }
                rows.append(row)
                print(f"{name}, {block}, {context} tokens, {what}", file=sys.stderr, flush=True)
    return rows


def _put_and_get(
    spec_of: Callable[[str], StoreSpec], block_bytes: int, block_tokens: int, count: int, repeat: int
) -> dict[str, list[float]]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (spec_of("a"), StoreContext("a", block_bytes, block_tokens), count, repeat, theirs)
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=arguments, daemon=True)
    writer.start()
    reader = _made(spec_of("b"), StoreContext("b", block_bytes, block_tokens))
    into = np.zeros((count, block_bytes), np.uint8)
    taken: dict[str, list[float]] = {"put": [], "find": [], "get": []}
    for number in range(repeat + 1):
        put_s = ours.recv()
        keys = _keys(number, count)
        find_s, get_s = _timed(partial(reader.find, keys)), _timed(partial(reader.get, keys, into))
        if number:  # the first call touches everything for the first time
            assert reader.get(keys, into) == count, "the pool lost blocks just put: give it more memory"
            for what, seconds in (("put", put_s), ("find", find_s), ("get", get_s)):
                taken[what].append(seconds)
        reader.drop(keys)
        ours.send(None)
    writer.join()
    reader.close()
    return taken


def _write(spec: StoreSpec, host: StoreContext, count: int, repeat: int, peer: Connection) -> None:
    writer = _made(spec, host)
    blocks = np.random.default_rng(0).integers(0, 256, (count, host.block_bytes), np.uint8)
    for number in range(repeat + 1):
        keys = _keys(number, count)
        peer.send(_timed(partial(writer.put, keys, blocks)))
        peer.recv()
    writer.close()


def _made(spec: StoreSpec, host: StoreContext) -> KVStore:
    module, _, name = spec.path.partition(":")
    made: KVStore = getattr(importlib.import_module(module), name)(dict(spec.settings), host)
    return made


def _keys(number: int, count: int) -> list[bytes]:
    return [(number * count + i).to_bytes(32, "little") for i in range(count)]


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# One request.


@attrs.define(eq=False)
class ChunkSink:
    """Receives what one engine sends, a chunk at a time."""

    answer: asyncio.Future[ChunkOutput] | None = None

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Resolve the chunk that is waited for."""
        assert self.answer is not None
        self.answer.set_result(output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Fail the benchmark."""
        raise RuntimeError(reason)

    def reported(self, report: InstanceReported) -> None:
        """Ignore telemetry."""

    def degraded(self, degradation: InstanceDegraded) -> None:
        """Fail the benchmark."""
        raise RuntimeError(degradation.reason)

    def lost(self, instance_id: str, reason: str) -> None:
        """Fail the benchmark."""
        raise RuntimeError(reason)


async def move(options: argparse.Namespace, name: str) -> list[Row]:
    """Time the next token of a request whose KV is in the pool, nowhere, or in the engine's own cache."""
    runtime = Runtime.from_config(config_of(options, [f"seer.kv_pool={name}"]))
    pool, sink = runtime.kv_pool, ChunkSink()
    assert pool is not None
    here, there = list(runtime.engines.values())[:2]
    dice = random.Random(0)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    outputs: dict[tuple[int, str], ChunkOutput] = {}

    async def next_token(engine: Any, tokens: Sequence[int]) -> tuple[float, ChunkOutput]:
        sink.answer = asyncio.get_running_loop().create_future()
        job = ChunkJob(f"{dice.random()}", "r", "g", list(tokens), len(tokens), 1, Sampling(1.0), 0, 0)
        begun = time.perf_counter()
        engine.submit(job)
        output = await sink.answer
        return time.perf_counter() - begun, output

    try:
        for engine in (here, there):
            engine.set_kv_pool(pool.strategy)
        await pool.strategy.start([here.id, there.id])
        infos = await asyncio.gather(here.start(sink), there.start(sink))
        for number in range(options.rounds + 1):
            for context in options.contexts:
                tokens = [dice.randrange(10, runtime.model.vocab_size) for _ in range(context)]
                output = (await next_token(here, tokens))[1]
                tokens += output.token_ids
                for way, engine in (("stay", here), ("pool", there), ("prefill", there)):
                    if way == "prefill":
                        await there.reset_cache()
                        await pool.strategy.clear()
                    took_s, output = await next_token(engine, tokens)
                    if number:  # the first round warms up
                        seconds[context, way].append(took_s)
                        outputs[context, way] = output
    finally:
        await asyncio.gather(here.stop(), there.stop())
        await pool.strategy.stop()
    rows = []
    for (context, way), taken in seconds.items():
        counts = {
            each: getattr(outputs[context, way], each)
            for each in ("cached_tokens", "pool_tokens", "prefilled_tokens")
        }
        rows.append(
            {
                "part": "move",
                "pool": name,
                "context_tokens": context,
                "way": way,
                "ms": spread_of(each * 1e3 for each in taken),
                **counts,
            }
        )
    measured = [
        {"prefill_us": info.prefill_s_per_token * 1e6, "fetch_us": (info.fetch_s_per_token or 0) * 1e6}
        for info in infos
    ]
    return [*rows, {"part": "start", "pool": name, "measured_per_token": measured}]


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--pool", nargs="+", default=["local"], help="plug-ins that make pools (default local)"
    )
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 3000], help="tokens")
    parser.add_argument("--rollouts", type=int, default=3, help="rounds of rollouts (default 3)")
    parser.add_argument("--groups", type=int, default=48, help="prompt groups of `rollout` (default 48)")
    parser.add_argument(
        "--larger-groups", type=int, default=32, help="prompt groups of `larger` (default 32)"
    )
    parser.add_argument("--memory-mib", type=int, default=64, help="memory of the pools of `larger`")
    parser.add_argument("--disk-mib", type=int, default=512, help="disk of the pool of `larger`")
    parser.add_argument("--chunk", type=int, default=64, help="chunk tokens (default 64)")


async def run(options: argparse.Namespace) -> list[Row]:
    """Run the parts that were asked for."""
    rows: list[Row] = []
    for name in options.pool:
        if "store" in options.parts:
            rows += await store(options, name)
        if "move" in options.parts:
            rows += await move(options, name)
    if "rollout" in options.parts:
        rows += await rollouts(options, "rollout", rollout_ways(options), options.groups)
    if "larger" in options.parts:
        rows += await rollouts(options, "larger", larger_ways(options), options.larger_groups)
    return rows


def table(rows: Sequence[Row]) -> str:
    """Return a table for each part that was run."""
    parts = {part: [row for row in rows if row["part"] == part] for part in PARTS}
    tables = []
    if mine := parts["store"]:
        lines = [
            [
                row["pool"],
                row["block"],
                row["what"],
                f"{row['context_tokens']:,}",
                f"{row['block_us']['median']:,.1f}",
                "" if row["what"] == "find" else cell(row["gb_per_s"], ".2f"),
            ]
            for row in mine
        ]
        tables.append(markdown(["pool", "block", "call", "tokens", "us per block", "GB/s"], lines, left=3))
    if mine := parts["move"]:
        lines = [
            [
                row["pool"],
                row["way"],
                f"{row['context_tokens']:,}",
                cell(row["ms"]),
                f"{row['prefilled_tokens']:,}",
            ]
            for row in mine
        ]
        columns = ["pool", "KV is", "old tokens", "ms to the next token", "prefilled"]
        tables.append(markdown(columns, lines, left=2))
    for part in ("rollout", "larger"):
        if mine := parts[part]:
            tables.append(_rollout_table(mine))
    return "\n\n".join(tables)


def _rollout_table(rows: Sequence[Row]) -> str:
    lines = []
    for way in dict.fromkeys(row["way"] for row in rows):
        mine = [row for row in rows if row["way"] == way]
        names = ("migrations", "cached_tokens", "pool_tokens", "prefilled_tokens")
        same = "yes" if all(row["same_tokens"] for row in mine) else "no"
        totals = cell(row["total_time_s"] for row in mine)
        lines.append([way, totals, *(f"{mine[0][name]:,}" for name in names), same])
    columns = [
        rows[0]["part"],
        "total time, s",
        "migrations",
        "cached",
        "from the pool",
        "prefilled",
        "same tokens",
    ]
    return markdown(columns, lines)
