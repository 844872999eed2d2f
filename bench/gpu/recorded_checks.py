"""Rollouts of recorded responses on a GPU: real steps of a model of 7B, arm by arm.

Two instances of vLLM share the GPU.  Their weights are drawn, and what they write are recorded responses
(``recorded_worker``), by default those of the bundled model, which ``bench/data`` has.  KV is as short as in
the paper: a quarter of all text fits.  Stock vLLM gets the same prompts, half of them on each of two engines,
and writes as many tokens of its own.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

from bench.gpu.check import GpuMachine
from bench.gpu.recorded_part import (
    BLOCK_TOKENS,
    DRAFT_TOKENS,
    INSTANCES,
    RecordedPart,
    kv_bytes,
    part_of,
    shape_of,
)
from bench.gpu.recorded_worker import FIRST_SEED, WORKER, save_texts
from bench.gpu.sessions import HIGHEST, LOWEST, SHARED_GPU, Row, dtype_of, python_path, roll_out, session_of

MOST_RUNNING = 128
GRAPHS = (1, 2, 4, 8, 12, 16, 24, 32, 40, 48, 64, 80, 96, 128)
SHARE = 0.4
"""The part of a GPU's memory that each instance may take."""
POOL_BYTES = 24 << 30

BATCH = (1, 8, 32, 64)
CONTEXTS = (128, 768)
"""Of the steps that are measured."""

FOUND: dict[str, Row] = {}
"""Rows of arms that have ended, by their name; the checks that follow read them."""


ARMS = {
    "veRL's policy": "verl",
    "divided": "divided",
    "posterior": "posterior",
    "posterior with drafts": "posterior+sd",
}


def engine_options(machine: GpuMachine, drafts: bool) -> Row:
    """Return vLLM's arguments beside those that Seer decides."""
    options: Row = {"load_format": "dummy", "skip_tokenizer_init": True}
    if machine.device == "cuda":
        sizes = {*GRAPHS, *((1 + DRAFT_TOKENS) * each for each in GRAPHS)} if drafts else {*GRAPHS}
        options["gpu_memory_utilization"] = SHARE
        options["compilation_config"] = {"backend": "eager", "cudagraph_capture_sizes": sorted(sizes)}
    return options


def records_of(part: RecordedPart) -> list[Row]:
    """Return the prompts, whose responses may be as long as the longest one."""
    records, number = [], 0
    for group, prompt in part.prompts.items():
        n = len(part.of(group))
        seeds = tuple(FIRST_SEED + number + index for index in range(n))
        known = {"group_id": group, "prompt_token_ids": list(prompt), "n": n, "seeds": seeds}
        records.append({**known, "max_tokens": part.longest})
        number += n
    return records


def warm_up_records() -> list[Row]:
    """Return prompts that are in no recording."""
    drawn = random.Random(0)
    return [
        {
            "group_id": f"warm-up-{number}",
            "prompt_token_ids": [drawn.randint(LOWEST, HIGHEST) for _ in range(24)],
            "n": 4,
            "max_tokens": 12,
            "ignore_eos": True,
        }
        for number in range(4)
    ]


def config_of(machine: GpuMachine, part: RecordedPart, policy: str, folder: Path) -> Row:
    """Return the config of an arm, whose model and recorded tokens are in ``folder``."""
    from seer_lab.policies import POLICIES

    chosen = POLICIES[policy]
    drafts = "grouped_spec" in chosen.plugins
    pool = {"local": {"capacity_bytes": POOL_BYTES if machine.device == "cuda" else 1 << 28}}
    extra = {"worker_cls": WORKER, "additional_config": {"recorded": str(folder / "texts.npz")}}
    settings: Row = {
        "model": str(folder),
        "dtype": dtype_of(machine),
        "instances": INSTANCES,
        "kv_cache_bytes": kv_bytes(machine, part.kv_tokens),
        "block_size": BLOCK_TOKENS,
        "max_running": 16 if machine.small else MOST_RUNNING,
        "max_model_tokens": part.context_tokens,
        "start_timeout_s": 600.0,
        "enforce_eager": machine.device == "cpu",
        "engine_args": engine_options(machine, drafts) | extra,
    }
    return {
        "seer": {
            "plugins": list(chosen.plugins),
            "engine": "vllm",
            **({"kv_pool": "local"} if chosen.shares_kv else {}),
        },
        "engine": {"vllm": settings},
        "plugin": {"grouped_spec": {"draft_tokens": DRAFT_TOKENS}} if drafts else {},
        **({"kv_pool": pool} if chosen.shares_kv else {}),
    }


def environment_of(machine: GpuMachine) -> dict[str, str]:
    """Return the variables of workers, which import this package."""
    return {"PYTHONPATH": python_path()} | ({} if machine.small else SHARED_GPU)


def roll(machine: GpuMachine, name: str, policy: str, *, steps: bool) -> list[Row]:
    """Roll the responses out under a policy, and with ``steps`` time made-up ones on both instances."""
    part = part_of(machine)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        (folder / "config.json").write_text(json.dumps(shape_of(machine)))
        owners = [(len(part.prompts[key.rpartition("/")[0]]), text) for key, text in part.responses.items()]
        save_texts(folder / "texts.npz", owners)
        config, begun_s = config_of(machine, part, policy, folder), time.perf_counter()
        with session_of(config, environment_of(machine)) as session:
            roll_out(session, warm_up_records())
            start_s = time.perf_counter() - begun_s
            rolled = roll_out(session, records_of(part))
            profile = profile_of(machine, session, policy) if steps else None
    other = sum(tuple(tokens) != part.responses[key] for key, tokens in rolled.tokens.items())
    summary = rolled.summary
    row = {
        "arm": name,
        "responses": len(part.responses),
        "tokens": summary.tokens,
        "total, s": summary.total_time_s,
        "tail, s": summary.tail_time_s,
        "tokens/s": summary.tokens / summary.total_time_s,
        "preemptions": summary.preemptions,
        "computed again": summary.recomputed_tokens,
        "tokens per step": summary.acceptance_length,
        "unlike the recorded": other,
        "start, s": start_s,
        **({} if profile is None else {"profile": profile}),
    }
    FOUND[name] = row
    assert not other, f"an arm wrote something else than the recorded text: {row}"
    return [row]


def profile_of(machine: GpuMachine, session: Any, policy: str) -> Row:
    """Return the times of steps that both instances make at once."""
    import msgspec
    from seer_cli.profiles import make_profile, measure_tables

    engines = list(session.runtime.engines.values())
    drafts = (0, DRAFT_TOKENS) if policy.endswith("+sd") else (0,)
    batch, contexts = ((1, 4), (16, 32)) if machine.small else (BATCH, CONTEXTS)
    tables = session.submit(measure_tables(engines, batch, drafts, contexts)).result()
    infos = list(session.runtime.alive.values())
    made = make_profile(tables, infos, engine="vllm", instances=len(engines), together=True)
    found: Row = msgspec.to_builtins(made)
    return found


def verl(machine: GpuMachine) -> list[Row]:
    """Roll out under veRL's policy."""
    return roll(machine, "veRL's policy", "verl", steps=True)


def divided(machine: GpuMachine) -> list[Row]:
    """Roll out in chunks, first come first served."""
    return roll(machine, "divided", "divided", steps=False)


def posterior(machine: GpuMachine) -> list[Row]:
    """Roll out in chunks, longest plausible response first."""
    return roll(machine, "posterior", "posterior", steps=False)


def drafted(machine: GpuMachine) -> list[Row]:
    """Roll out likewise, with drafts from siblings."""
    return roll(machine, "posterior with drafts", "posterior+sd", steps=True)


def stock(machine: GpuMachine) -> list[Row]:
    """Let two engines of vLLM alone write as many tokens for the same prompts, each for half of them."""
    from seer_session.results import tail_time_s
    from seer_vllm.plugin import vllm_environment

    part = part_of(machine)
    environment = vllm_environment(os.environ, 1, None, "auto") | environment_of(machine)
    if not machine.small:
        environment["CUDA_VISIBLE_DEVICES"] = "0"
    with tempfile.TemporaryDirectory() as scratch:
        Path(scratch, "config.json").write_text(json.dumps(shape_of(machine)))
        options = {
            "model": scratch,
            "dtype": dtype_of(machine),
            "max_model_len": part.context_tokens,
            "max_num_seqs": 16 if machine.small else MOST_RUNNING,
            "block_size": BLOCK_TOKENS,
            "kv_cache_memory_bytes": kv_bytes(machine, part.kv_tokens),
            "enforce_eager": machine.device == "cpu",
            **engine_options(machine, drafts=False),
        }
        begun_s = time.perf_counter()
        engines = [
            subprocess.Popen(
                [sys.executable, __file__],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env=environment,
                text=True,
            )
            for _ in range(INSTANCES)
        ]
        try:
            for number, engine in enumerate(engines):
                mine = list(part.prompts)[number::INSTANCES]
                requests = [(list(part.prompts[each]), len(text)) for each in mine for text in part.of(each)]
                _send(engine, {"options": options, "requests": requests})
            for engine in engines:
                _answer(engine)
            start_s = time.perf_counter() - begun_s
            for engine in engines:
                _send(engine, "go")
            ends = sorted(chain.from_iterable(_answer(engine) for engine in engines))
        finally:
            for engine in engines:
                engine.kill()
                engine.wait()
    tokens = sum(map(len, part.responses.values()))
    row = {
        "arm": "stock vLLM",
        "responses": len(ends),
        "tokens": tokens,
        "total, s": ends[-1],
        "tail, s": tail_time_s(ends),
        "tokens/s": tokens / ends[-1],
        "start, s": start_s,
    }
    FOUND["stock vLLM"] = row
    return [row]


def _send(engine: subprocess.Popen[str], message: Any) -> None:
    assert engine.stdin is not None
    engine.stdin.write(json.dumps(message) + "\n")
    engine.stdin.flush()


def _answer(engine: subprocess.Popen[str]) -> Any:
    """Return the next answer of an engine, past what vLLM prints."""
    assert engine.stdout is not None
    for line in engine.stdout:
        if line.startswith("answer "):
            return json.loads(line.removeprefix("answer "))
    raise AssertionError("an engine of stock vLLM failed: its words stand above")


def serve_stock() -> None:
    """Make an engine, wait, and print when each response has ended, in seconds."""
    from vllm import LLM, SamplingParams
    from vllm.sampling_params import RequestOutputKind

    job = json.loads(sys.stdin.readline())
    llm = LLM(**job["options"])
    engine = llm.llm_engine

    def write(requests: Sequence[tuple[list[int], int]]) -> list[float]:
        begun_s, ends = time.perf_counter(), []
        for number, (prompt, tokens) in enumerate(requests):
            params = SamplingParams(
                temperature=1.0,
                max_tokens=tokens,
                ignore_eos=True,
                logprobs=0,
                detokenize=False,
                output_kind=RequestOutputKind.FINAL_ONLY,
            )
            engine.add_request(str(number), {"prompt_token_ids": prompt}, params)
        while engine.has_unfinished_requests():
            ended = [each for each in engine.step() if each.finished]
            ends += [time.perf_counter() - begun_s] * len(ended)
        return ends

    write([(each["prompt_token_ids"], each["max_tokens"]) for each in warm_up_records()])
    llm.reset_prefix_cache()
    print("answer", json.dumps("ready"), flush=True)
    sys.stdin.readline()
    print("answer", json.dumps(write(job["requests"])), flush=True)


if __name__ == "__main__":
    serve_stock()
    os._exit(0)  # engines' threads have nothing to say any more
