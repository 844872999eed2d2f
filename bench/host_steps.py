"""Steps of one engine in this process, for ``draft_step``: ``python bench/host_steps.py ENGINE ...``.

Prints a JSON line for each batch and number of drafts: the CPU seconds that this thread took for a step
outside of the model, a median.  It imports nothing of this package, for it runs in each engine's own
environment, and under another commit's packages.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from time import thread_time
from typing import Any

import numpy as np
from seer_worker.process.adapter import ScriptedTokens
from seer_worker.wire import Start

from seer_core.model import Sampling
from seer_core.ports.drafting import SourceSpec
from seer_core.ports.engine import ChunkJob

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny_reasoner"
WARM_UP, PROMPT_TOKENS = 10, 100
LOWEST, HIGHEST = 5, 60
"""Token ids of prompts, which the bundled model has."""
LIMITS = {"kv_cache_bytes": 1 << 26, "max_model_tokens": 3200, "max_running": 256}
SOURCE = SourceSpec("seer_grouped_spec.source:GroupedSource", {}, 8)


class OutsideTimer:
    """The thread's CPU time outside of calls that are left out."""

    def __init__(self) -> None:
        self._inside_s = 0.0

    def leave_out(self, holder: Any, name: str) -> None:
        """Count no time of this method from now on."""
        call = getattr(holder, name)

        def timed(*arguments: Any, **named: Any) -> Any:
            begun_s = thread_time()
            try:
                return call(*arguments, **named)
            finally:
                self._inside_s += thread_time() - begun_s

        setattr(holder, name, timed)

    def time(self, step: Callable[[], object]) -> float:
        """Return the seconds of a step."""
        inside_s, begun_s = self._inside_s, thread_time()
        step()
        return thread_time() - begun_s - (self._inside_s - inside_s)


def vllm(start: Callable[..., Start], timer: OutsideTimer) -> Any:
    """Return an instance of vLLM."""
    from seer_vllm.instance import VllmAdapter
    from seer_vllm.plugin import Settings, engine_args

    settings = Settings(model="weights", dtype="float32", **LIMITS)
    adapter = VllmAdapter(start(engine_args(settings, EXAMPLE / "weights")))
    timer.leave_out(runner_of(adapter), "_model_forward")
    return adapter.bench()


def runner_of(adapter: Any) -> Any:
    """Return vLLM's model runner, or what stands in for it."""
    return adapter.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def sglang(start: Callable[..., Start], timer: OutsideTimer) -> Any:
    """Return an instance of SGLang."""
    from seer_sglang.instance import SglangAdapter
    from seer_sglang.plugin import Settings, engine_args

    settings = Settings(model="weights", dtype="float32", **LIMITS)
    adapter = SglangAdapter(start(engine_args(settings, EXAMPLE / "weights")))
    timer.leave_out(adapter.engine.runner.model, "forward")
    return adapter.bench()


def paced(start: Callable[..., Start], timer: OutsideTimer) -> Any:
    """Return vLLM's scheduler on an emulated accelerator."""
    from msgspec import to_builtins
    from seer_paced.emulated_clock import CountingClock
    from seer_paced.settings import Settings
    from seer_paced.vllm_instance import EmulatedVllm

    settings = Settings(
        preset="h800-qwen2.5-14b",
        kv_capacity_tokens=1 << 21,
        max_model_tokens=LIMITS["max_model_tokens"],
        max_running=LIMITS["max_running"],
    )
    adapter = EmulatedVllm(start(to_builtins(settings)), CountingClock(), MadeUpText())
    timer.leave_out(runner_of(adapter), "_write")
    return PacedBench(adapter)


class MadeUpText:
    """A script of one token."""

    has_text = True

    def tokens_of(self, job: ChunkJob) -> ScriptedTokens:
        """Return as many tokens as a chunk may have."""
        return ScriptedTokens([LOWEST] * job.max_tokens, None)


class PacedBench:
    """The counterpart of ``VllmBench`` without a model."""

    def __init__(self, adapter: Any) -> None:
        self._adapter = adapter
        self.step = adapter.step
        self.make_up_drafts = adapter.bench().make_up_drafts

    def add(self, name: str, prompt: Sequence[int], max_tokens: int) -> None:
        """Queue a request."""
        tokens = list(prompt)
        self._adapter.submit(
            ChunkJob(name, name, name, tokens, len(tokens), max_tokens, Sampling(), 0, 0), ""
        )

    def drop(self, names: Sequence[str]) -> None:
        """Forget requests."""
        self._adapter.abort(names)


ENGINES = {"vllm": vllm, "sglang": sglang, "paced": paced}


def print_steps(
    make: Callable[..., Any], scratch: str, batches: Sequence[int], drafts: Sequence[int], steps: int
) -> None:
    """Print the lines of an engine; without any number of ``drafts`` it is one that cannot draft."""
    timer = OutsideTimer()
    source = SOURCE if drafts else None
    bench = make(lambda arguments: Start("bench", "", arguments, scratch, source=source), timer)
    drawn = np.random.default_rng(0)
    for batch in batches:
        for tokens in drafts or (None,):
            names = [f"{batch}-{tokens}-{number}" for number in range(batch)]
            for name in names:
                prompt = drawn.integers(LOWEST, HIGHEST, PROMPT_TOKENS).tolist()
                bench.add(name, prompt, 2 * (WARM_UP + steps))
            if tokens is not None:
                bench.make_up_drafts(tokens)
            for _ in range(WARM_UP):
                bench.step()
            found = [timer.time(bench.step) for _ in range(steps)]
            bench.drop(names)
            print(json.dumps({"batch": batch, "drafts": tokens, "host_s": statistics.median(found)}))


def main() -> None:
    """Read the command line, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=ENGINES)
    parser.add_argument("--batch", type=int, nargs="+", required=True)
    parser.add_argument("--drafts", type=int, nargs="*", default=[], help="made-up tokens of each request")
    parser.add_argument("--steps", type=int, default=60)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        print_steps(ENGINES[options.engine], scratch, options.batch, options.drafts, options.steps)
    sys.stdout.flush()
    os._exit(0)  # engines' threads have nothing to say any more


if __name__ == "__main__":
    main()
