"""Rollouts on vLLM for the checks of a machine with a GPU: configs, prompts, environments, seconds."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

from bench.gpu.check import ROOT, GpuMachine, Missing

Row = dict[str, Any]
MODEL = ROOT / "examples" / "tiny_reasoner" / "weights"
PROMPT_TOKENS = 64
LOWEST, HIGHEST = 5, 60
"""Token ids of prompts, which every model has."""
EXACT = {"VLLM_BATCH_INVARIANT": "1"}
"""With it a GPU's logits do not depend on the batch."""
SHARED_GPU = {"CUDA_VISIBLE_DEVICES": "0,0"}
"""Two instances, each with the first GPU."""
RUNNERS = ("first", "second")
KV_BYTES = 1 << 30
"""The KV cache of an engine that shares its GPU."""
SMALL_SHARE = {"gpu_memory_utilization": 0.05}
"""What of a shared GPU's memory has to be free when an engine starts."""


class Rolled(NamedTuple):
    """A rollout: the tokens of each response by its id, the seconds it took, and its summary."""

    tokens: dict[str, list[int]]
    seconds: float
    summary: Any

    @property
    def tokens_per_s(self) -> float:
        """Return the tokens of all responses per second."""
        return sum(map(len, self.tokens.values())) / self.seconds

    def unlike(self, other: Rolled) -> int:
        """Return how many responses differ from those of another rollout of the same prompts."""
        assert self.tokens.keys() == other.tokens.keys(), "a rollout lacks responses"
        return sum(tokens != other.tokens[name] for name, tokens in self.tokens.items())


def dtype_of(machine: GpuMachine) -> str:
    """Return the type of weights and logits: on a GPU that of large models."""
    return "float32" if machine.device == "cpu" else "bfloat16"


def config_of(
    machine: GpuMachine,
    tokens: int,
    running: int,
    engine: Mapping[str, Any],
    plugins: Mapping[str, Mapping[str, Any]],
    pool_bytes: int = 0,
) -> Row:
    """Return the config of a rollout in four chunks, with further settings of the engine and plug-ins."""
    memory = {"kv_cache_bytes": 1 << 26} if machine.device == "cpu" else {"enforce_eager": False}
    if machine.shared:
        memory["kv_cache_bytes"] = KV_BYTES
        engine = {**engine, "engine_args": {**SMALL_SHARE, **engine.get("engine_args", {})}}
    settings = {
        "model": str(machine.model or MODEL),
        "dtype": dtype_of(machine),
        "max_model_tokens": PROMPT_TOKENS + tokens,
        "max_running": running,
        "start_timeout_s": 600.0,
        **memory,
        **engine,
    }
    return {
        "seer": {
            "plugins": ["divided_rollout", "context_sched", *plugins],
            "engine": "vllm",
            **({"kv_pool": "local"} if pool_bytes else {}),
        },
        "engine": {"vllm": settings},
        "plugin": {"divided_rollout": {"chunk_tokens": max(tokens // 4, 4)}, **plugins},
        **({"kv_pool": {"local": {"capacity_bytes": pool_bytes}}} if pool_bytes else {}),
    }


def prompts(groups: int, tokens: int, responses: int = 1) -> list[Row]:
    """Return prompts of so many responses, each of which has so many tokens."""
    drawn = random.Random(0)
    return [
        {
            "group_id": f"prompt-{number}",
            "prompt_token_ids": [drawn.randint(LOWEST, HIGHEST) for _ in range(PROMPT_TOKENS)],
            "n": responses,
            "max_tokens": tokens,
            "seed": number,
            "ignore_eos": True,
        }
        for number in range(groups)
    ]


@contextmanager
def session_of(
    config: Mapping[str, Any], environment: Mapping[str, str] | None = None, observers: Sequence[Any] = ()
) -> Iterator[Any]:
    """Start a session, whose workers have these variables."""
    from seer_host.config_files import make_config
    from seer_session import Session

    before = {name: os.environ.get(name) for name in environment or {}}
    os.environ.update(environment or {})
    try:
        made = make_config(dict(config), base_dir=Path(), origin="gpu-check")
        with Session(made, observers) as session:
            yield session
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def roll_out(session: Any, records: Sequence[Mapping[str, Any]]) -> Rolled:
    """Return a rollout of these prompts."""
    start = time.perf_counter()
    tokens = {
        each.request_id: [*each.token_ids] for each in session.stream([*map(dict, records)], iteration=0)
    }
    return Rolled(tokens, time.perf_counter() - start, session.result.summary)


def roll_out_warm(
    config: Mapping[str, Any], environment: Mapping[str, str], records: Sequence[Mapping[str, Any]]
) -> Rolled:
    """Return the second rollout of these prompts, in a session of its own; the first one warms up."""
    with session_of(config, environment) as session:
        roll_out(session, records)
        return roll_out(session, records)


def in_a_process(script: str, job: Mapping[str, Any], runner: Literal["auto", "first", "second"]) -> Any:
    """Return what a script prints last, as JSON, with vLLM in it and this job at its standard input."""
    from seer_vllm.plugin import vllm_environment

    environment = vllm_environment(os.environ, 1, None, runner)
    environment.pop("TRITON_INTERPRET", None)
    done = subprocess.run(
        [sys.executable, script],
        input=json.dumps(job),
        env={**environment, "VLLM_CPU_OMP_THREADS_BIND": "nobind", "PYTHONPATH": python_path()},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"an engine failed: {done.stderr[-2000:]}"
    return json.loads(done.stdout.splitlines()[-1])


def given_up(summary: Any) -> dict[str, int]:
    """Return which parts of instances were given up, with how many reports.

    That a response goes on otherwise than whole, as bfloat16 may on a CPU, is none: the tokens are compared.
    """
    return {what: count for what, count in summary.degradations.items() if what != "continuation"}


def python_path() -> str:
    """Return a PYTHONPATH for processes that import this package, before all that is on it already."""
    return os.pathsep.join(filter(None, (str(ROOT), os.environ.get("PYTHONPATH"))))


def needs_gpu(machine: GpuMachine, what: str) -> None:
    """Say that a dry run leaves something out.

    Raises:
        Missing: this is one.
    """
    if machine.device == "cpu":
        raise Missing(f"{what} needs a GPU")
