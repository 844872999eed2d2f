"""Two stock ``vllm serve`` on CPUs: requests to each in turn, beside Seer over the same servers."""

from __future__ import annotations

import asyncio
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import aiohttp
from seer_session import Session

from bench.harness import EXAMPLE, Row, prompts, spread_of, turned
from bench.stock_servers import StockServer, stock_servers

__all__ = ["KV_BYTES", "REAL_ARMS", "measure_real"]

KV_BYTES = {"short": 1 << 22, "ample": 1 << 25}
"""The KV of each server: 2,048 tokens of the bundled model, or 16,384."""
LONGEST = 1024
REAL_ARMS = {"each in turn": "", "Seer": "none", "Seer, KV shared": "local"}
"""The run's pool; none is a client that sends whole responses to one server after the other."""
TAIL = 0.9
"""The tail begins when so many of the responses are over."""
CONFIG = """
[seer]
engine = "remote"
kv_pool = "{pool}"
plugins = ["divided_rollout", "context_sched"]
[engine.remote]
urls = {urls}
model = "{model}"
[plugin.divided_rollout]
chunk_tokens = {chunk}
"""


def measure_real(groups: int, most: int, chunk: int, rounds: int) -> list[Row]:
    """Roll the same prompts out in each arm in turn, on servers with little KV and with ample."""
    asked = [
        each | {"max_tokens": most, "seeds": list(range(1000 * number, 1000 * number + each["n"]))}
        for number, each in enumerate(prompts(groups))
    ]
    for each in asked:
        del each["seed"]
    rows: list[Row] = []
    for kv, kv_bytes in KV_BYTES.items():
        found: dict[str, list[Row]] = {arm: [] for arm in REAL_ARMS}
        texts: dict[str, dict[str, list[int]]] = {}
        with (
            tempfile.TemporaryDirectory() as place,
            stock_servers(Path(place), longest=LONGEST, kv_bytes=kv_bytes) as both,
        ):
            asyncio.run(_in_turn(both, asked[:1]))  # first steps, and what this process imports late
            for _, arm in turned(list(REAL_ARMS), rounds):
                before = _counted(both)
                if pool := REAL_ARMS[arm]:
                    row, texts[arm] = _seer(Path(place), both, asked, pool, chunk, before)
                else:
                    row, texts[arm] = asyncio.run(_in_turn(both, asked))
                    row |= _spent(both, before)
                found[arm].append(row)
                print(f"KV {kv}, {arm}: {row}", file=sys.stderr, flush=True)
        alone = texts["each in turn"]
        for arm, mine in found.items():
            figures = {name: spread_of(each[name] for each in mine) for name in mine[0]}
            rows.append({"part": "real", "kv": kv, "arm": arm, "same": texts[arm] == alone} | figures)
    return rows


async def _in_turn(
    both: Sequence[StockServer], asked: Sequence[Row]
) -> tuple[dict[str, float], dict[str, list[int]]]:
    """Send all responses at once, each to the next server."""
    from seer_worker.tokenizer import ModelTokenizer

    tokenizer = ModelTokenizer(EXAMPLE / "weights")
    texts: dict[str, list[int]] = {}
    ends_s: list[float] = []
    began_s, began_cpu_s = time.monotonic(), time.process_time()
    timeout = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=timeout, connector=aiohttp.TCPConnector(limit=0)) as client:

        async def write(number: int, name: str, tokens: list[int], how: dict[str, Any]) -> None:
            url = f"{both[number % len(both)].url}/inference/v1/generate"
            async with client.post(url, json={"token_ids": tokens, "sampling_params": how}) as answer:
                [choice] = (await answer.json())["choices"]
            texts[name] = choice["token_ids"]
            ends_s.append(time.monotonic() - began_s)

        tasks = []
        for each in asked:
            tokens = tokenizer.encode(each["prompt"])
            for index, seed in enumerate(each["seeds"]):
                how = {"seed": seed, "max_tokens": each["max_tokens"], "temperature": 1.0, "logprobs": 0}
                tasks.append(write(len(tasks), f"{each['group_id']}/{index}", tokens, how))
        await asyncio.gather(*tasks)
    row = {"driver_cpu_s": time.process_time() - began_cpu_s, "chunks": len(texts), "moves": 0}
    return row | _times(ends_s) | {"tokens": sum(map(len, texts.values()))}, texts


def _seer(
    folder: Path,
    both: Sequence[StockServer],
    asked: Sequence[Row],
    pool: str,
    chunk: int,
    before: dict[str, float],
) -> tuple[dict[str, float], dict[str, list[int]]]:
    config = folder / "rollout.toml"
    urls = json.dumps([each.url for each in both])
    config.write_text(CONFIG.format(pool=pool, urls=urls, model=EXAMPLE / "weights", chunk=chunk))
    texts, ends_s = {}, []
    with Session(config) as session:
        before |= _counted(both)  # without the tests at the start
        began_s, began_cpu_s = time.monotonic(), time.process_time()
        for each in session.stream(asked, 0):
            texts[each.request_id] = list(each.token_ids)
            ends_s.append(time.monotonic() - began_s)
        spent = {"driver_cpu_s": time.process_time() - began_cpu_s} | _spent(both, before)
        summary = session.result.summary
    counts = {"chunks": summary.chunks, "moves": summary.migrations, "tokens": summary.tokens}
    return counts | _times(ends_s) | spent, texts


def _times(ends_s: list[float]) -> dict[str, float]:
    ends_s.sort()
    return {"total_s": ends_s[-1], "tail_s": ends_s[-1] - ends_s[int(TAIL * len(ends_s)) - 1]}


def _counted(both: Sequence[StockServer]) -> dict[str, float]:
    names = {
        "computed": "vllm:prompt_tokens_total",
        "cached": "vllm:prompt_tokens_cached_total",
        "preemptions": "vllm:num_preemptions_total",
    }
    found = {key: sum(each.figure(name) for each in both) for key, name in names.items()}
    found["computed"] -= found.pop("cached")
    return found | {"server_cpu_s": sum(each.cpu_s() for each in both)}


def _spent(both: Sequence[StockServer], before: dict[str, float]) -> dict[str, float]:
    return {name: each - before[name] for name, each in _counted(both).items()}
