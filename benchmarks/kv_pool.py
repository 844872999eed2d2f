"""KV pools: what a block and a request cost, when moving wins, what rollouts gain.

store    put, look up and get alone, by two processes of one host, a request's blocks a call
move     the next token of a request of so many tokens, on an instance that never saw it: with its KV from the
         pool, and prefilled again; and on the instance that has it; so, from which length on moving wins
rollout  the tiny reasoner's prompts in chunks of --chunk tokens on two instances: never moving, and every
         chunk on another instance than the one before, with each pool and with none
larger   responses in turn, a chunk each, whose KV all together is several times the engines': prefilled
         again, from a pool of a quarter of it in memory, and from one with a disk tier below

Medians [least, most] of --repeat calls, or of --rollouts rollouts, ways in turned order within one run.

python benchmarks/kv_pool.py --pool local mooncake --json out/kv_pool.json
python benchmarks/kv_pool.py --pool local mooncake --parts move rollout --set seer.engine=sglang
"""

from __future__ import annotations

import argparse
import asyncio
import importlib
import logging
import multiprocessing
import random
import shlex
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import attrs
import msgspec
import numpy as np
import structlog
from equality import EXAMPLE
from kv_rollouts import Row, config_of, larger_ways, rollout_ways, rollouts, shown, spread

from seer_core.config import load_config
from seer_core.events import InstanceReported, InstanceTroubled
from seer_core.kv import KVStore, StoreHost, StoreSpec
from seer_core.model import Sampling
from seer_core.plugins import assemble
from seer_core.ports import ChunkJob, ChunkOutput
from seer_core.runtime import Runtime

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
                    _put_and_get, slot.strategy.store, block_bytes, block_tokens, count, options.repeat
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
                    "request_us": spread(each * 1e6 for each in seconds),
                    "block_us": spread(each * 1e6 / count for each in seconds),
                    "gb_per_s": spread(count * block_bytes / each / 1e9 for each in seconds),
                }
                rows.append(row)
                speed = "" if what == "find" else shown(row["gb_per_s"], 2) + " GB/s"
                print(
                    f"{name:9} {block:13} {context:5} tokens, {what:4} {shown(row['request_us'])} us,"
                    f" {row['block_us']['median']:8.1f} us per block {speed}",
                    flush=True,
                )
    return rows


def _put_and_get(
    spec_of: Callable[[str], StoreSpec], block_bytes: int, block_tokens: int, count: int, repeat: int
) -> dict[str, list[float]]:
    ours, theirs = multiprocessing.Pipe()
    arguments = (spec_of("a"), StoreHost("a", block_bytes, block_tokens), count, repeat, theirs)
    writer = multiprocessing.get_context("spawn").Process(target=_write, args=arguments, daemon=True)
    writer.start()
    reader = _made(spec_of("b"), StoreHost("b", block_bytes, block_tokens))
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


def _write(spec: StoreSpec, host: StoreHost, count: int, repeat: int, peer: Connection) -> None:
    writer = _made(spec, host)
    blocks = np.random.default_rng(0).integers(0, 256, (count, host.block_bytes), np.uint8)
    for number in range(repeat + 1):
        keys = _keys(number, count)
        peer.send(_timed(partial(writer.put, keys, blocks)))
        peer.recv()
    writer.close()


def _made(spec: StoreSpec, host: StoreHost) -> KVStore:
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

    def troubled(self, trouble: InstanceTroubled) -> None:
        """Say why."""
        raise RuntimeError(trouble.reason)

    def lost(self, instance_id: str, reason: str) -> None:
        """Say why."""
        raise RuntimeError(reason)


async def move(options: argparse.Namespace, name: str) -> list[Row]:
    """Time the next token of a request whose KV is in the pool, nowhere, or in the engine's own cache."""
    runtime = Runtime.from_config(config_of(options, [f"seer.kv_pool={name}"]))
    pool, sink = runtime.kv_pool, Sink()
    assert pool is not None
    here, there = list(runtime.fleet.engines.values())[:2]
    dice = random.Random(0)
    seconds: dict[tuple[int, str], list[float]] = defaultdict(list)
    outputs: dict[tuple[int, str], ChunkOutput] = {}

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
        infos = await asyncio.gather(here.start(sink), there.start(sink))
        for number in range(options.repeat + 1):
            for context in options.contexts:
                tokens = [dice.randrange(10, runtime.fleet.model.vocab_size) for _ in range(context)]
                output = (await run(here, tokens))[1]
                tokens += output.token_ids
                for way, engine in (("stay", here), ("pool", there), ("prefill", there)):
                    if way == "prefill":
                        await there.reset_cache()
                        await pool.strategy.clear()
                    took_s, output = await run(engine, tokens)
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
        ms = spread(each * 1e3 for each in taken)
        rows.append({"part": "move", "pool": name, "context_tokens": context, "way": way, "ms": ms, **counts})
        print(f"{name:9} {context:5} tokens, {way:8} {shown(ms)} ms  prefilled {counts['prefilled_tokens']}")
    wins = [
        context
        for context in options.contexts
        if spread(seconds[context, "pool"])["median"] < spread(seconds[context, "prefill"])["median"]
    ]
    measured = [
        {"prefill_us": info.prefill_s_per_token * 1e6, "fetch_us": (info.fetch_s_per_token or 0) * 1e6}
        for info in infos
    ]
    print(f"{name:9} moving wins at {wins} of {options.contexts} tokens; the engines measured {measured}")
    return [*rows, {"part": "move", "pool": name, "wins_at_tokens": wins, "measured_per_token": measured}]


async def main(options: argparse.Namespace) -> list[Row]:
    """Run the parts asked for."""
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


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument(
        "--pool", nargs="+", default=["local"], help="plug-ins that make pools (default local)"
    )
    parser.add_argument("--repeat", type=int, default=7, help="repeats of store and move (default 7)")
    parser.add_argument("--contexts", type=int, nargs="+", default=[256, 1024, 3000], help="tokens")
    parser.add_argument("--rollouts", type=int, default=3, help="rounds of rollouts (default 3)")
    parser.add_argument("--groups", type=int, default=48, help="prompt groups of `rollout` (default 48)")
    parser.add_argument(
        "--larger-groups", type=int, default=32, help="prompt groups of `larger` (default 32)"
    )
    parser.add_argument("--memory-mib", type=int, default=64, help="memory of the pools of `larger`")
    parser.add_argument("--disk-mib", type=int, default=512, help="disk of the pool of `larger`")
    parser.add_argument("--chunk", type=int, default=64, help="chunk tokens (default 64)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write command and rows as JSON")
    arguments = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    command = shlex.join(["python", "benchmarks/kv_pool.py", *sys.argv[1:]])
    print(command, flush=True)
    found = asyncio.run(main(arguments))
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        document = msgspec.json.encode({"command": command, "rows": found})
        arguments.json.write_bytes(msgspec.json.format(document) + b"\n")
