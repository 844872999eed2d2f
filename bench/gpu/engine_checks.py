"""A real rollout on vLLM: the same tokens in every batch, and its throughput beside stock vLLM."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

from bench.gpu.check import GpuMachine
from bench.gpu.sessions import (
    EXACT,
    KV_BYTES,
    MODEL,
    PROMPT_TOKENS,
    RUNNERS,
    SMALL_SHARE,
    Rolled,
    Row,
    config_of,
    dtype_of,
    in_a_process,
    prompts,
    roll_out,
    session_of,
)


def batches(machine: GpuMachine) -> tuple[tuple[int, ...], int]:
    """Return the sizes of batches, and how many tokens each response has."""
    return ((1, 4), 8) if machine.small else ((1, 8, 64), 512)


def rollouts(machine: GpuMachine) -> list[Row]:
    """Compare the tokens of one, eight and 64 responses, and time them with and without Seer.

    A small run is one on a CPU, where nothing is scheduled asynchronously.
    """
    sizes, tokens = batches(machine)
    exact = by_size(machine, tokens if machine.small else 128, {} if machine.small else EXACT)
    timed = exact if machine.small else by_size(machine, tokens, {})
    stepwise = exact if machine.small else by_size(machine, tokens, {}, async_scheduling=False)
    stock = stock_rollouts(machine, tokens)
    rows = []
    for size in sizes:
        theirs = stock[str(size)]
        rows.append(
            {
                "responses": size,
                "tokens of each": tokens,
                "unlike those of the largest batch": unlike_largest(exact, size),
                "Seer, tokens/s": timed[size].tokens_per_s,
                "without async scheduling, tokens/s": stepwise[size].tokens_per_s,
                "stock vLLM, tokens/s": size * tokens / theirs,
                "ratio": theirs / timed[size].seconds,
            }
        )
    for row in rows:
        assert not row["unlike those of the largest batch"], f"a response depends on its batch: {row}"
    return rows


def invariance(machine: GpuMachine) -> list[Row]:
    """Count the responses that depend on their batch, and time them, with and without batch invariance.

    A small run has neither the second runner nor batch invariance, whose kernels need a GPU.
    """
    sizes, tokens = batches(machine)
    rows = []
    for runner in RUNNERS[:1] if machine.small else RUNNERS:
        for environment in ({},) if machine.small else ({}, EXACT):
            found = by_size(machine, tokens, environment, runner=runner)
            rows.append(
                {
                    "model runner": runner,
                    "batch invariant": bool(environment),
                    "responses alone": sizes[0],
                    "unlike those of the largest batch": unlike_largest(found, sizes[0]),
                    "tokens/s of the largest batch": found[sizes[-1]].tokens_per_s,
                }
            )
    for row in rows:
        wrong = row["batch invariant"] and row["unlike those of the largest batch"]
        assert not wrong, f"a response depends on its batch: {row}"
    return rows


def by_size(
    machine: GpuMachine, tokens: int, environment: Mapping[str, str], **settings: Any
) -> dict[int, Rolled]:
    """Return a rollout of each size, in one session with these settings of ``[engine.vllm]``."""
    sizes, _ = batches(machine)
    config = config_of(machine, tokens, sizes[-1], settings, {})
    found = {}
    with session_of(config, environment) as session:
        for size in (sizes[-1], *sizes):  # the first warms up
            found[size] = roll_out(session, prompts(size, tokens))
    return found


def unlike_largest(found: Mapping[int, Rolled], size: int) -> int:
    """Return how many responses of a batch differ from the same ones in the largest batch."""
    largest = found[max(found)].tokens
    return sum(tokens != largest[name] for name, tokens in found[size].tokens.items())


def stock_rollouts(machine: GpuMachine, tokens: int) -> dict[str, float]:
    """Return the seconds that vLLM by itself takes for each size, in a process of its own."""
    sizes, _ = batches(machine)
    options: Row = {
        "model": str(machine.model or MODEL),
        "dtype": dtype_of(machine),
        "max_model_len": PROMPT_TOKENS + tokens,
        "max_num_seqs": sizes[-1],
        "enforce_eager": machine.device == "cpu",
        "skip_tokenizer_init": True,
    }
    if machine.device == "cpu":
        options["kv_cache_memory_bytes"] = 1 << 26
    elif machine.shared:
        options |= {"kv_cache_memory_bytes": KV_BYTES, **SMALL_SHARE}
    job = {"options": options, "sizes": sizes, "prompts": prompts(sizes[-1], tokens)}
    found: dict[str, float] = in_a_process(__file__, job, "auto")
    return found


def time_stock(options: Mapping[str, Any], sizes: Sequence[int], prompts: Sequence[Row]) -> dict[int, float]:
    """Return the seconds that vLLM takes for so many of the prompts."""
    from vllm import LLM, SamplingParams

    llm = LLM(**options)
    inputs = [{"prompt_token_ids": each["prompt_token_ids"]} for each in prompts]
    params = [
        SamplingParams(
            temperature=1.0,
            max_tokens=each["max_tokens"],
            seed=each["seed"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
        )
        for each in prompts
    ]
    found = {}
    for size in (sizes[-1], *sizes):
        llm.reset_prefix_cache()
        start = time.perf_counter()
        llm.generate(inputs[:size], params[:size], use_tqdm=False)
        found[size] = time.perf_counter() - start
    return found


if __name__ == "__main__":
    print(json.dumps(time_stock(**json.load(sys.stdin))))
