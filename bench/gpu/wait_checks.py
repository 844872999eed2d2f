"""How often the host waits for the GPU in a step of vLLM's, and in which line.

PyTorch warns of each wait (``set_sync_debug_mode``), and the warning names the line.  Lines of Seer's must
not wait, but for the one that reads the tokens from which a source drafts on the second model runner.  In a
dry run waits are counted on a device that is not there, in Seer's part of a step alone.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from bench.gpu.check import GpuMachine
from bench.gpu.sampler_checks import WAITED
from bench.gpu.sessions import Row, in_a_process, needs_gpu
from bench.gpu.step_checks import LARGE, SMALL, adapter_of

DRAFT_TOKENS = 4
BATCH = 8
WARM_UP, STEPS = 20, 20
READ = "seer_vllm/speculator.py"
"""The file that reads the tokens of a step, once, for a source that drafts on the second model runner."""


def waits_first(machine: GpuMachine) -> list[Row]:
    """Count the waits of a step on vLLM's first model runner, with and without drafts."""
    return wait_rows(machine, "first")


def waits_second(machine: GpuMachine) -> list[Row]:
    """Count the same on its second."""
    needs_gpu(machine, "vLLM's second model runner")
    return wait_rows(machine, "second")


def wait_rows(machine: GpuMachine, runner: Literal["first", "second"]) -> list[Row]:
    """Return a row for each number of drafts: the waits of a step, Seer's and vLLM's, and Seer's lines."""
    rows: list[Row] = []
    for drafts in ([], [0, DRAFT_TOKENS]):
        settings: Row = {
            "max_model_tokens": 1024,
            "max_running": BATCH,
            "dtype": "bfloat16",
            "kv_cache_bytes": 1 << 26 if machine.small else 1 << 30,
            "engine_args": {"load_format": "dummy", "skip_tokenizer_init": True},
        }
        job = {
            "settings": settings,
            "shape": SMALL if machine.small else {**LARGE, "num_hidden_layers": 4},
            "drafts": drafts,
            "small": machine.small,
        }
        for found in in_a_process(__file__, job, runner):
            rows.append({"model runner": runner, **found})
    for row in rows:
        lines = [line for line in row["Seer's lines"].split(", ") if line and not line.startswith(READ)]
        assert not lines, f"the host waits for the device: {row}"
        assert row["Seer's waits"] <= 1, f"the host waits more than once: {row}"
    return rows


def count_waits(settings: Row, shape: Row, drafts: Sequence[int], small: bool) -> list[Row]:
    """Return the waits of a step for each number of drafts, of an engine in this process."""
    with tempfile.TemporaryDirectory() as folder:
        adapter = adapter_of(settings, shape, Path(folder), drafts=bool(drafts))
        take = on_nothing(adapter) if small else on_gpu()
        bench = adapter.meters().bench
        found = []
        for tokens in drafts or (None,):
            names = [f"{tokens}/{number}" for number in range(BATCH)]
            for number, name in enumerate(names):
                bench.add(name, [5 + (number + place) % 50 for place in range(64)], 2 * (WARM_UP + STEPS))
            if tokens is not None:
                bench.make_up_drafts(tokens)
            for _ in range(WARM_UP):
                bench.step()
            take()
            for _ in range(STEPS):
                bench.step()
            waits = take()
            bench.drop(names)
            ours = {line: count for line, count in waits.items() if line.startswith("seer_")}
            found.append(
                {
                    "drafts of each": "cannot draft" if tokens is None else tokens,
                    "requests": BATCH,
                    "Seer's waits": sum(ours.values()) / STEPS,
                    "all waits": waits.total() / STEPS,
                    "Seer's lines": ", ".join(sorted(ours)),
                }
            )
        return found


def on_gpu() -> Any:
    """Have PyTorch warn of waits; return a function that returns those since its last call, by line."""
    import torch

    counts: Counter[str] = Counter()

    def note(message: Any, category: Any, filename: str, lineno: int, *_: Any) -> None:
        if WAITED in str(message):
            counts[f"{'/'.join(Path(filename).parts[-2:])}:{lineno}"] += 1

    def take() -> Counter[str]:
        found = counts.copy()
        counts.clear()
        return found

    warnings.simplefilter("always")
    warnings.showwarning = note
    torch.cuda.set_sync_debug_mode("warn")
    return take


def on_nothing(adapter: Any) -> Any:
    """Have Seer's part work on a device that is not there; return the same."""
    from bench.host_steps import WaitCounter, count_vllm

    counter = WaitCounter()
    count_vllm(adapter, counter)
    return lambda: Counter({f"seer_vllm: {name}": count for name, count in (+counter.take()[0]).items()})


if __name__ == "__main__":
    print(json.dumps(count_waits(**json.load(sys.stdin))), flush=True)
    os._exit(0)  # engines' threads have nothing to say any more
