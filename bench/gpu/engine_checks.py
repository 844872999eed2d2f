"""A real rollout on vLLM: the same tokens in every batch, and its throughput beside stock vLLM."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.check import ROOT, GpuMachine

Row = dict[str, Any]
MODEL = ROOT / "examples" / "tiny_reasoner" / "weights"
PROMPT_TOKENS = 64
LOWEST, HIGHEST = 5, 60
"""Token ids of prompts, which every model has."""
EXACT = {"VLLM_BATCH_INVARIANT": "1"}
"""With it a GPU's logits do not depend on the batch."""
CONFIG = """
[seer]
plugins = ["divided_rollout", "context_sched"]
engine = "vllm"
[engine.vllm]
model = {model}
dtype = "{dtype}"
max_model_tokens = {longest}
max_running = {running}
{more}
[plugin.divided_rollout]
chunk_tokens = {chunk}
"""


def batches(machine: GpuMachine) -> tuple[tuple[int, ...], int]:
    """Return the sizes of batches, and how many tokens each response has."""
    return ((1, 4), 8) if machine.small else ((1, 8, 64), 512)


def rollouts(machine: GpuMachine) -> list[Row]:
    """Compare the tokens of one, eight and 64 responses, and time them with and without Seer."""
    sizes, tokens = batches(machine)
    tokens_exact = tokens if machine.small else 128
    exact = seer_rollouts(machine, tokens_exact, {} if machine.small else EXACT)
    timed = exact if machine.small else seer_rollouts(machine, tokens, {})
    stock = stock_rollouts(machine, tokens)
    rows = []
    for size in sizes:
        ours, theirs = timed[size]["seconds"], stock[str(size)]
        other = sum(
            one != many
            for one, many in zip(exact[size]["tokens"], exact[sizes[-1]]["tokens"][:size], strict=True)
        )
        rows.append(
            {
                "responses": size,
                "tokens of each": tokens,
                "unlike those of the largest batch": other,
                "Seer, tokens/s": size * tokens / ours,
                "stock vLLM, tokens/s": size * tokens / theirs,
                "ratio": theirs / ours,
            }
        )
    for row in rows:
        assert not row["unlike those of the largest batch"], f"a response depends on its batch: {row}"
    return rows


def prompts(count: int, tokens: int) -> list[Row]:
    """Return prompts of one response each, with seeds of their own."""
    drawn = random.Random(0)
    return [
        {
            "group_id": f"prompt-{number}",
            "prompt_token_ids": [drawn.randint(LOWEST, HIGHEST) for _ in range(PROMPT_TOKENS)],
            "n": 1,
            "max_tokens": tokens,
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(count)
    ]


def seer_rollouts(machine: GpuMachine, tokens: int, environment: Mapping[str, str]) -> dict[int, Row]:
    """Return the seconds and the tokens of a rollout of each size, in one session."""
    from seer_core import Session

    sizes, _ = batches(machine)
    found = {}
    before = {name: os.environ.get(name) for name in environment}
    os.environ.update(environment)
    try:
        with tempfile.TemporaryDirectory() as folder:
            config = Path(folder) / "seer.toml"
            config.write_text(config_of(machine, tokens), "utf-8")
            with Session(config) as session:
                for size in (sizes[-1], *sizes):  # the first warms up
                    records = prompts(size, tokens)
                    start = time.perf_counter()
                    responses = {each.group_id: [*each.token_ids] for each in session.stream(records)}
                    seconds = time.perf_counter() - start
                    ordered = [responses[each["group_id"]] for each in records]
                    found[size] = {"seconds": seconds, "tokens": ordered}
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
    return found


def config_of(machine: GpuMachine, tokens: int) -> str:
    """Return the config of a rollout in chunks."""
    sizes, _ = batches(machine)
    more = "kv_cache_bytes = 67_108_864" if machine.device == "cpu" else "enforce_eager = false"
    return CONFIG.format(
        model=json.dumps(str(machine.model or MODEL)),
        dtype=dtype_of(machine),
        longest=PROMPT_TOKENS + tokens,
        running=sizes[-1],
        chunk=max(tokens // 4, 4),
        more=more,
    )


def dtype_of(machine: GpuMachine) -> str:
    """Return the type of weights and logits: on a GPU that of large models."""
    return "float32" if machine.device == "cpu" else "bfloat16"


def stock_rollouts(machine: GpuMachine, tokens: int) -> dict[str, float]:
    """Return the seconds that vLLM by itself takes for each size, in a process of its own."""
    from seer_vllm.plugin import vllm_environment

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
    job = {"options": options, "sizes": sizes, "prompts": prompts(sizes[-1], tokens)}
    environment = {**vllm_environment(os.environ, 1, None, "auto"), "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps(job),
        env={**environment, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"stock vLLM failed: {done.stderr[-2000:]}"
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
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
