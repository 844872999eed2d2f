"""Steps of one engine, or the sampler alone, for ``draft_step``: ``python bench/host_steps.py ENGINE ...``.

Prints a JSON line for each batch and number of drafts: the CPU seconds that this thread took for a step
outside of the model, a median; with --waits instead the most often that the host would wait for a device in
Seer's part of a step, and for what (``device_waits``).  For ``sampler`` it prints the CPU seconds of one
choice by kind of cut, the least of all repeats, on one thread; with --kernels what each kernel needs,
compiled for a GPU that need not be there.  It imports nothing of this package but ``gpu`` of the checkout on
the path, for it runs in each engine's own environment, and under another commit's packages.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from time import process_time, thread_time
from typing import Any

import numpy as np
import torch
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
VOCAB = 151_936
"""The vocabulary of the Qwen models."""
SPREAD = 4.0
"""The standard deviation of logits, as ``gpu-check`` draws them."""
CUTS = {"none": {}, "top-p": {"top_p": 0.9}, "top-k": {"top_k": 50}, "both": {"top_k": 50, "top_p": 0.9}}
CUTS |= {"top-p 0.5": {"top_p": 0.5}}


def _beside(name: str) -> Any:
    """Return a module that lies beside this one."""
    spec = spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class WaitCounter:
    """Has parts of an engine work on a device that is not there, and counts the waits of the host."""

    def __init__(self) -> None:
        self._device = _beside("device_waits")
        self.found: Counter[str] = Counter()
        self.operations = 0

    def watch(self, holder: Any, name: str, *fields: str) -> None:
        """Put the tensors of a method's arguments there, and those ``fields`` of other arguments."""
        call = getattr(holder, name)

        def there(argument: Any) -> Any:
            named = [each for each in fields if isinstance(getattr(argument, each, None), torch.Tensor)]
            if not named:
                return self._device.on_device(argument)
            made = copy.copy(argument)
            for each in named:
                setattr(made, each, self._device.on_device(getattr(argument, each)))
            return made

        def counted(*arguments: Any, **options: Any) -> Any:
            with self._device.DeviceWaits() as waits:
                found = call(*map(there, arguments), **{key: there(each) for key, each in options.items()})
            self.found += waits.found
            self.operations += waits.operations
            return self.back(found)

        setattr(holder, name, counted)

    def back(self, found: Any) -> Any:
        """Return what a call returned, with its tensors in main memory."""
        for name in ("sampled_token_ids", "logprobs_tensors", "logits_indices"):
            if hasattr(found, name):
                setattr(found, name, self._device.off_device(getattr(found, name)))
        return self._device.off_device(found)

    def take(self) -> tuple[Counter[str], int]:
        """Return the waits and operations since the last call."""
        taken = self.found, self.operations
        self.found, self.operations = Counter(), 0
        return taken


def count_vllm(adapter: Any, counter: WaitCounter) -> None:
    """Count in what stands in for a part of vLLM's model runner."""
    runner = runner_of(adapter)
    if hasattr(runner, "req_states"):
        counter.watch(runner.sampler, "sample")
        if runner.rejection_sampler is not None:
            counter.watch(runner.rejection_sampler, "_verify")
            counter.watch(runner.speculator, "propose", "idx_mapping")
        return
    counter.watch(runner, "_sample")
    prepare = runner._calc_spec_decode_metadata

    def prepared(*arguments: Any) -> Any:
        here, runner.device = runner.device, torch.device("meta")
        try:
            return prepare(*arguments)
        finally:
            runner.device = here

    runner._calc_spec_decode_metadata = prepared
    counter.watch(runner, "_calc_spec_decode_metadata")


def count_sglang(adapter: Any, counter: WaitCounter) -> None:
    """Count in what stands in for SGLang's sampler and for what verifies its drafts."""
    from sglang.srt.speculative import ngram_worker

    counter.watch(adapter.engine.runner, "sampler", "next_token_logits")
    links = "draft_token", "retrieve_next_token", "retrieve_next_sibling", "positions"
    counter.watch(ngram_worker, "eagle_sample", "next_token_logits", *links)


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


def vllm(start: Callable[..., Start], timer: OutsideTimer | WaitCounter) -> Any:
    """Return an instance of vLLM."""
    from seer_vllm.instance import VllmAdapter
    from seer_vllm.plugin import Settings as VllmSettings
    from seer_vllm.plugin import engine_args

    settings = VllmSettings(model="weights", dtype="float32", **LIMITS)
    adapter: Any = VllmAdapter(start(engine_args(settings, EXAMPLE / "weights")))
    if isinstance(timer, WaitCounter):
        count_vllm(adapter, timer)
    else:
        timer.leave_out(runner_of(adapter), "_model_forward")
    return adapter.meters().bench


def runner_of(adapter: Any) -> Any:
    """Return vLLM's model runner, or what stands in for it."""
    return adapter.engine.engine_core.engine_core.model_executor.driver_worker.worker.model_runner


def sglang(start: Callable[..., Start], timer: OutsideTimer | WaitCounter) -> Any:
    """Return an instance of SGLang."""
    from seer_sglang.instance import SglangAdapter
    from seer_sglang.plugin import Settings as SglangSettings
    from seer_sglang.plugin import engine_args

    settings = SglangSettings(model="weights", dtype="float32", **LIMITS)
    adapter: Any = SglangAdapter(start(engine_args(settings, EXAMPLE / "weights")))
    if isinstance(timer, WaitCounter):
        count_sglang(adapter, timer)
    else:
        timer.leave_out(adapter.engine.runner.model, "forward")
    return adapter.meters().bench


def paced(start: Callable[..., Start], timer: OutsideTimer) -> Any:
    """Return vLLM's scheduler on an emulated accelerator."""
    from msgspec import to_builtins
    from seer_paced.emulated_clock import CountingClock
    from seer_paced.settings import Settings as PacedSettings
    from seer_paced.vllm_instance import EmulatedVllm

    settings = PacedSettings(
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
        self.make_up_drafts = adapter.meters().bench.make_up_drafts

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
    make: Callable[..., Any],
    scratch: str,
    batches: Sequence[int],
    drafts: Sequence[int],
    steps: int,
    *,
    waits: bool = False,
) -> None:
    """Print the lines of an engine; without any number of ``drafts`` it is one that cannot draft."""
    counts = WaitCounter()
    timer = OutsideTimer()
    source = SOURCE if drafts else None
    bench = make(
        lambda arguments: Start("bench", "", arguments, scratch, source=source), counts if waits else timer
    )
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
            line: dict[str, Any] = {"batch": batch, "drafts": tokens}
            if waits:
                line |= waits_of(bench, counts, steps)
            else:
                line["host_s"] = statistics.median(timer.time(bench.step) for _ in range(steps))
            bench.drop(names)
            print(json.dumps(line))


def waits_of(bench: Any, counts: WaitCounter, steps: int) -> dict[str, Any]:
    """Return the waits and the operations of the step that has most of each."""
    counts.take()
    most: Counter[str] = Counter()
    operations = 0
    for _ in range(steps):
        bench.step()
        found, made = counts.take()
        most, operations = max(most, found, key=Counter.total), max(operations, made)
    return {"waits": most.total(), "for": +most, "operations": operations}


def print_times(rows: int, repeats: int) -> None:
    """Print the CPU time of one choice for so many rows, by each kind of cut."""
    from seer_worker.sampling.keyed import keyed_choices

    torch.set_num_threads(1)
    random = torch.Generator().manual_seed(1)
    logits = torch.randn(rows, VOCAB, generator=random) * SPREAD
    seeds, positions = torch.randint(2**62, (rows,), generator=random), torch.arange(rows) + 100
    for name, cuts in CUTS.items():
        top_k, top_p = (
            None if value is None else torch.full((rows,), value)
            for value in (cuts.get("top_k"), cuts.get("top_p"))
        )
        times = []
        for _ in range(repeats):
            begun_s = process_time()
            chosen = keyed_choices(logits, torch.ones(rows), top_k, top_p, seeds, positions)
            times.append(process_time() - begun_s)
        digest = int((chosen * (torch.arange(rows) + 1)).sum())
        print(json.dumps({"cuts": name, "rows": rows, "cpu_s": min(times), "tokens": digest}), flush=True)


def print_kernels(target: str) -> None:
    """Print what each kernel needs on this target."""
    from bench.gpu.compiled import KERNELS, compiled

    for name in KERNELS:
        found = compiled(name, target)
        print(json.dumps({key: found[key] for key in ("kernel", "instructions", "per_logit", "registers")}))


def main() -> None:
    """Read the command line, and print."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("engine", choices=[*ENGINES, "sampler"])
    parser.add_argument("--batch", type=int, nargs="+")
    parser.add_argument("--drafts", type=int, nargs="*", default=[], help="made-up tokens of each request")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--waits", action="store_true", help="count waits for a device, and take no times")
    parser.add_argument("--rows", type=int, default=256, help="of logits, for the sampler")
    parser.add_argument("--repeats", type=int, default=1, help="of the sampler's choices")
    parser.add_argument("--kernels", metavar="TARGET", help="compile the sampler's for it, and take no times")
    options = parser.parse_args()
    if options.kernels:
        print_kernels(options.kernels)
    elif options.engine == "sampler":
        print_times(options.rows, options.repeats)
    else:
        engine = ENGINES[options.engine]
        with tempfile.TemporaryDirectory() as scratch:
            print_steps(engine, scratch, options.batch, options.drafts, options.steps, waits=options.waits)
    sys.stdout.flush()
    os._exit(0)  # engines' threads have nothing to say any more


if __name__ == "__main__":
    main()
