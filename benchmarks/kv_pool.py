"""The KV pool: what a block costs, what moving a request costs, what a rollout that always moves costs.

store    put and get alone, by two processes of one host: microseconds per block, GB/s
move     the next token of a request of so many tokens, on an instance that never saw it: with its KV in
         the pool, and prefilled again; and on the instance that has it
rollout  the tiny reasoner's prompts in chunks of --chunk tokens on two instances: never moving, and every
         chunk on another instance than the one before, with and without the pool

python benchmarks/kv_pool.py --json out/kv_pool.json
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import structlog
from equality import EXAMPLE, Nomad
from seer_kv_local import LocalPool
from seer_kv_local.store import LocalStore

from seer_core.config import Config, load_config
from seer_core.events import InstanceReported
from seer_core.kv import StoreHost
from seer_core.model import InstanceStatus, Request, Sampling
from seer_core.plugins import fill_slots
from seer_core.ports import ChunkJob, ChunkOutput
from seer_core.prompts import read_prompts
from seer_core.runtime import Runtime
from seer_core.scheduler import Slot

Row = dict[str, Any]
PARTS = ("store", "move", "rollout")
BLOCK_BYTES = {"tiny reasoner, 32 tokens": 65_536, "8B, 16 tokens": 2_097_152}
BATCH = 32
"""Blocks per call: a request of 1024 tokens."""


# The store alone.


def store(options: argparse.Namespace) -> list[Row]:
    """Put in another process, get in this one."""
    rows = []
    for name, block_bytes in BLOCK_BYTES.items():
        pool = LocalPool(max(256 << 20, 2 * BATCH * 2 * block_bytes))
        asyncio.run(pool.start(["a", "b"]))
        ours, theirs = multiprocessing.Pipe()
        settings = dict(pool.store("a").settings)
        writer = multiprocessing.get_context("spawn").Process(
            target=_write, args=(settings, block_bytes, options.repeat, theirs)
        )
        writer.start()
        reader = LocalStore(settings, StoreHost("b", block_bytes, 32))
        into = np.zeros((BATCH, block_bytes), np.uint8)
        puts, finds, gets = [], [], []
        for number in range(options.repeat * 5):
            puts.append(ours.recv())
            keys = _keys(number)
            finds.append(_timed(partial(reader.find, keys)))
            gets.append(_timed(partial(reader.get, keys, into)))
            assert reader.get(keys, into) == BATCH
            ours.send(None)
        writer.join()
        for what, seconds in (("put", puts), ("find", finds), ("get", gets)):
            each = statistics.median(seconds) / BATCH
            rows.append(
                {
                    "part": "store",
                    "block": name,
                    "block_bytes": block_bytes,
                    "what": what,
                    "us_per_block": each * 1e6,
                    "gb_per_s": None if what == "find" else block_bytes / each / 1e9,
                }
            )
        reader.close()
        asyncio.run(pool.stop())
    return rows


def _write(settings: dict[str, Any], block_bytes: int, repeat: int, peer: Connection) -> None:
    writer = LocalStore(settings, StoreHost("a", block_bytes, 32))
    blocks = np.random.default_rng(0).integers(0, 256, (BATCH, block_bytes), np.uint8)
    for number in range(repeat * 5):
        keys = _keys(number)
        peer.send(_timed(partial(writer.put, keys, blocks)))
        peer.recv()


def _keys(number: int) -> list[bytes]:
    return [(number * BATCH + i).to_bytes(32, "little") for i in range(BATCH)]


def _timed(work: Callable[[], object]) -> float:
    begun = time.perf_counter()
    work()
    return time.perf_counter() - begun


# One request.


@attrs.define(eq=False)
class Sink:
    """Waits for one chunk at a time."""

    answer: asyncio.Future[ChunkOutput] | None = None

    def chunk_finished(self, instance_id: str, output: ChunkOutput) -> None:
        """Take it."""
        assert self.answer is not None
        self.answer.set_result(output)

    def chunk_failed(self, instance_id: str, job_id: str, reason: str) -> None:
        """Say why."""
        raise RuntimeError(reason)

    def reported(self, report: InstanceReported) -> None:
        """Ignore telemetry."""

    def lost(self, instance_id: str, reason: str) -> None:
        """Say why."""
        raise RuntimeError(reason)


async def move(options: argparse.Namespace, config: Config) -> list[Row]:
    """Time the next token of a request whose KV is in the pool, nowhere, or in the engine's own cache."""
    runtime = Runtime.from_config(config)
    pool, sink = runtime.kv_pool, Sink()
    assert pool is not None
    here, there = runtime.pool.engines[:2]
    dice = random.Random(0)
    seconds: dict[tuple[int, str], list[float]] = {}
    counts: dict[tuple[int, str], ChunkOutput] = {}

    async def run(engine: Any, tokens: Sequence[int]) -> tuple[float, ChunkOutput]:
        sink.answer = asyncio.get_running_loop().create_future()
        job = ChunkJob(f"{dice.random()}", "r", "g", list(tokens), len(tokens), 1, Sampling(1.0), 0, 0)
        begun = time.perf_counter()
        engine.submit(job)
        output = await sink.answer
        return time.perf_counter() - begun, output

    try:
        for engine in (here, there):
            engine.share_kv(pool.strategy)
        await pool.strategy.start([here.id, there.id])
        await asyncio.gather(here.start(sink), there.start(sink))
        for number in range(options.repeat + 1):
            for context in options.contexts:
                tokens = [dice.randrange(10, runtime.pool.model.vocab_size) for _ in range(context)]
                output = (await run(here, tokens))[1]
                tokens += output.token_ids
                for way, engine in (("stay", here), ("pool", there), ("prefill", there)):
                    if way == "prefill":
                        await there.reset_cache()
                        await pool.strategy.clear()
                    taken, output = await run(engine, tokens)
                    if number:  # the first round warms up
                        seconds.setdefault((context, way), []).append(taken)
                        counts[context, way] = output
    finally:
        await asyncio.gather(here.stop(), there.stop())
        await pool.strategy.stop()
    return [
        {
            "part": "move",
            "context_tokens": context,
            "way": way,
            "ms": statistics.median(taken) * 1e3,
            "least_ms": min(taken) * 1e3,
            "most_ms": max(taken) * 1e3,
            "cached_tokens": counts[context, way].cached_tokens,
            "pool_tokens": counts[context, way].pool_tokens,
            "prefilled_tokens": counts[context, way].prefilled_tokens,
        }
        for (context, way), taken in seconds.items()
    ]


# Rollouts.


class Settler(Nomad):
    """Placer that never lets a request move: its first instance is the emptiest one."""

    def place(
        self, request: Request, chunk_tokens: int, instances: Sequence[InstanceStatus]
    ) -> InstanceStatus | None:
        """Return the request's instance, once it has one."""
        home = [instance for instance in instances if instance.id == request.instance]
        fits = [
            instance
            for instance in home or instances
            if instance.free_slots > 0
            and instance.footprint(request, chunk_tokens) <= instance.free_kv_tokens
        ]
        return max(fits, key=lambda instance: (instance.free_kv_tokens, -instance.seq), default=None)


async def rollout(options: argparse.Namespace, config: Config) -> list[Row]:
    """Roll out in all ways, in turn, --rollouts times."""
    ways = (("never moving", Settler(), "local"), ("pool", Nomad(), "local"), ("no pool", Nomad(), "none"))
    rows, expected = [], None
    for number in range(options.rollouts):
        for kv_pool in ("local", "none"):
            seer = msgspec.structs.replace(config.seer, kv_pool=kv_pool)
            async with Runtime.from_config(msgspec.structs.replace(config, seer=seer)) as runtime:
                read = read_prompts(
                    EXAMPLE / "prompts.jsonl", config.rollout, runtime.pool.model, runtime.pool.tokenizer
                )
                for way, placer, pool in ways:
                    if pool != kv_pool:
                        continue
                    strategies = fill_slots(config.with_plugins(("divided_rollout", "context_sched")))
                    slot = Slot("placer", "benchmark", placer)
                    policies = attrs.evolve(strategies.policies, placer=slot)
                    await runtime.use(attrs.evolve(strategies, policies=policies))
                    await runtime.reset_caches()
                    before = runtime.kv_pool.strategy.stats() if runtime.kv_pool else None
                    result = await runtime.rollout(read.groups[: options.groups]).wait()
                    tokens = {one.request_id: one.token_ids for one in result.completions}
                    expected = expected or tokens
                    summary = result.summary
                    row: Row = {
                        "part": "rollout",
                        "way": way,
                        "round": number,
                        "same_tokens": tokens == expected,
                        **{
                            name: getattr(summary, name)
                            for name in (
                                "tokens",
                                "total_time_s",
                                "throughput_tokens_per_s",
                                "tail_time_s",
                                "chunks",
                                "migrations",
                                "preemptions",
                                "cached_tokens",
                                "pool_tokens",
                                "prefilled_tokens",
                                "recomputed_tokens",
                            )
                        },
                    }
                    if before is not None and runtime.kv_pool is not None:
                        after = runtime.kv_pool.strategy.stats()
                        row["pool_put_bytes"] = after.put_bytes - before.put_bytes
                        row["pool_got_bytes"] = after.got_bytes - before.got_bytes
                        row["pool_used_bytes"] = after.used_bytes
                        row["pool_evicted_blocks"] = after.evicted_blocks - before.evicted_blocks
                    rows.append(row)
                    show(row)
    return rows


def show(row: Row) -> None:
    """Print a row for people."""
    match row["part"]:
        case "store":
            speed = f"{row['gb_per_s']:6.2f} GB/s" if row["gb_per_s"] else ""
            print(f"{row['block']:26} {row['what']:5} {row['us_per_block']:9.1f} us per block {speed}")
        case "move":
            print(
                f"{row['context_tokens']:5} tokens, {row['way']:8} {row['ms']:8.1f} ms"
                f" [{row['least_ms']:.1f}, {row['most_ms']:.1f}]  prefilled {row['prefilled_tokens']}"
            )
        case "rollout":
            print(
                f"{row['way']:13} {row['total_time_s']:7.1f} s {row['throughput_tokens_per_s']:7,.0f} tok/s"
                f"  {row['migrations']:5} migrations  tokens: {row['cached_tokens']:9,} cached"
                f" {row['pool_tokens']:9,} pool {row['prefilled_tokens']:9,} prefilled"
                f"  same tokens: {row['same_tokens']}"
            )
    sys.stdout.flush()


def main(options: argparse.Namespace) -> list[Row]:
    """Run the parts asked for."""
    overrides = [f"plugin.divided_rollout.chunk_tokens={options.chunk}", *options.set]
    config = load_config(EXAMPLE / "demo.toml", overrides)
    rows: list[Row] = []
    if "store" in options.parts:
        rows += store(options)
    if "move" in options.parts:
        rows += asyncio.run(move(options, config))
    for row in rows:
        show(row)
    if "rollout" in options.parts:
        rows += asyncio.run(rollout(options, config))
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--repeat", type=int, default=7, help="repeats of store and move (default 7)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 3000], help="tokens")
    parser.add_argument("--groups", type=int, default=48, help="prompt groups to roll out (default 48)")
    parser.add_argument("--rollouts", type=int, default=3, help="rounds of rollouts (default 3)")
    parser.add_argument("--chunk", type=int, default=64, help="chunk tokens (default 64)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    found = main(arguments)
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_bytes(msgspec.json.format(msgspec.json.encode(found)) + b"\n")
