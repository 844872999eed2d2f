"""The time of a step that drafts, with full CUDA graphs and piecewise, for a large model's shapes.

Every request gets made-up drafts, of which none is accepted: what is left is their price, the model's own
time for their positions included.  The weights are drawn, so nothing is read from a disk, and the pieces of
the model are recorded as they are, with vLLM's own kernels, since compiling them would take minutes.
"""

from __future__ import annotations

import json
import os
import random
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any, Literal, NamedTuple

from bench.gpu.check import GpuMachine
from bench.gpu.sessions import HIGHEST, LOWEST, MODEL, PROMPT_TOKENS, Row, in_a_process, needs_gpu

DRAFT_TOKENS = 4
LARGE = {"hidden_size": 8192, "intermediate_size": 3696, "num_hidden_layers": 80, "vocab_size": 152_064}
"""What one of eight GPUs has of Qwen2-72B, with one of its eight heads for keys and values; all of its
vocabulary."""
SMALL = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 96}
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 128}
ROUNDS = 5


class DraftedSteps(NamedTuple):
    """An engine's drafts, and how many made-up tokens each request gets.

    ``uniform`` is None for an engine that cannot draft.  Drafts that are not padded and have fewer tokens
    than the engine has graphs for run piecewise.
    """

    name: str
    uniform: bool | None
    tokens: int = 0


ENGINES: tuple[tuple[DraftedSteps, ...], ...] = (
    (DraftedSteps("cannot draft", None),),
    (DraftedSteps("one length, nothing drafted", True), DraftedSteps("one length", True, DRAFT_TOKENS)),
    (
        DraftedSteps("own lengths, nothing drafted", False),
        DraftedSteps("own lengths", False, DRAFT_TOKENS - 1),
    ),
)


def steps_first(machine: GpuMachine) -> list[Row]:
    """Time steps that draft on vLLM's first model runner, beside those of an engine that cannot draft."""
    return step_times(machine, "first")


def steps_second(machine: GpuMachine) -> list[Row]:
    """Time the same on its second."""
    needs_gpu(machine, "vLLM's second model runner")
    return step_times(machine, "second")


def step_times(machine: GpuMachine, runner: Literal["first", "second"]) -> list[Row]:
    """Time steps with each kind of drafts, for batches of several sizes."""
    rows: list[Row] = []
    plain: dict[int, float] = {}
    for kinds in ENGINES[: 2 if machine.small else None]:
        start = time.perf_counter()
        found = in_a_process(__file__, job_of(machine, kinds), runner)
        print(f"{kinds[-1].name}: {time.perf_counter() - start:.0f} s", file=sys.stderr, flush=True)
        rows += rows_of(runner, kinds, found, plain)
    return rows


def rows_of(
    runner: str, kinds: Sequence[DraftedSteps], found: dict[str, list[float]], plain: dict[int, float]
) -> list[Row]:
    """Return an engine's rows; ``plain`` has the seconds of a step by batch, of the first kind for all."""
    rows = []
    for key, times in found.items():
        name, _, batch = key.partition("/")
        [tokens] = [each.tokens for each in kinds if each.name == name]
        seconds = median(times)
        rows.append(
            {
                "model runner": runner,
                "drafts": name,
                "tokens of each": tokens,
                "requests": int(batch),
                "a step, ms": 1e3 * seconds,
                "more than without, ms": 1e3 * (seconds - plain.setdefault(int(batch), seconds)),
                "spread, ms": 1e3 * (max(times) - min(times)),
            }
        )
    return rows


def job_of(machine: GpuMachine, kinds: Sequence[DraftedSteps]) -> Row:
    """Return the arguments of ``time_steps`` for an engine."""
    batches = (1, 4) if machine.small else (1, 8, 32, 64)
    settings: Row = {
        "max_model_tokens": 1024,
        "max_running": max(batches),
        "dtype": "bfloat16",
        "kv_cache_bytes": 1 << 26 if machine.small else 1 << 30,
        "engine_args": {"load_format": "dummy", "skip_tokenizer_init": True},
    }
    if kinds[0].uniform is not None:
        settings["uniform_drafts"] = kinds[0].uniform
    if not machine.small:
        sizes = {batch * tokens for batch in batches for tokens in (1, DRAFT_TOKENS, DRAFT_TOKENS + 1)}
        graphs = {"backend": "eager", "cudagraph_capture_sizes": sorted(sizes)}
        settings |= {"enforce_eager": False}
        settings["engine_args"]["compilation_config"] = graphs
    return {
        "settings": settings,
        "shape": SMALL if machine.small else LARGE,
        "kinds": kinds,
        "batches": batches,
        "steps": 4 if machine.small else 20,
        "rounds": 2 if machine.small else ROUNDS,
    }


def adapter_of(settings: Row, shape: Row, folder: Path, *, drafts: bool) -> Any:
    """Return an engine in this process, whose model is written into ``folder``."""
    from seer_vllm.instance import VllmAdapter
    from seer_vllm.plugin import Settings, engine_args
    from seer_worker.wire import Start

    from seer_core.ports.drafting import SourceSpec

    base = json.loads((MODEL / "config.json").read_text())
    layers = {"layer_types": ["full_attention"] * shape["num_hidden_layers"]}
    (folder / "config.json").write_text(json.dumps({**base, **HEADS, **shape, **layers}))
    arguments = engine_args(Settings(model=str(folder), **settings), folder)
    source = SourceSpec("seer_grouped_spec.source:GroupedSource", {}, DRAFT_TOKENS) if drafts else None
    return VllmAdapter(Start("bench", "", arguments, str(folder), source=source))


def time_steps(
    settings: Row, shape: Row, kinds: Sequence[Sequence[Any]], batches: Sequence[int], steps: int, rounds: int
) -> dict[str, list[float]]:
    """Return the seconds of a step of an engine in this process."""
    drafts = kinds[0][1] is not None
    with tempfile.TemporaryDirectory() as folder:
        bench = adapter_of(settings, shape, Path(folder), drafts=drafts).meters().bench
        return {
            f"{name}/{batch}": timed(bench, name, batch, tokens if drafts else None, steps, rounds)
            for batch in batches
            for name, _, tokens in kinds
        }


def timed(bench: Any, name: str, batch: int, drafted: int | None, steps: int, rounds: int) -> list[float]:
    """Return the seconds of a step of so many requests, in several rounds."""
    drawn = random.Random(batch)
    names = [f"{name}/{batch}/{number}" for number in range(batch)]
    for each in names:
        bench.add(each, [drawn.randint(LOWEST, HIGHEST) for _ in range(PROMPT_TOKENS)], 1 << 9)
    if drafted is not None:
        bench.make_up_drafts(drafted)
    for _ in range(2 * steps):  # the first of them prefill
        bench.step()
    times = []
    for _ in range(rounds):
        start = time.perf_counter()
        for _ in range(steps):
            bench.step()
        times.append((time.perf_counter() - start) / steps)
    bench.drop(names)
    return times


if __name__ == "__main__":
    print(json.dumps(time_steps(**json.load(sys.stdin))), flush=True)
    os._exit(0)  # engines' threads have nothing to say any more
