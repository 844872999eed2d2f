"""The sampler on this device: its tokens beside PyTorch's and a CPU's, and its speed."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from functools import partial
from statistics import median
from typing import Any

import torch

from bench.gpu.check import GpuMachine
from bench.gpu.devices import TARGETS
from bench.gpu.drawn_cases import KINDS, NEAR, differences, draw, row_by_row

Row = dict[str, Any]
LARGE = 151_936
REPEATS = 20
WAITED = "called a synchronizing"
"""Of PyTorch's warning for each wait; it also warns that the mode is new."""


def tokens(machine: GpuMachine) -> list[Row]:
    """Compare drawn cases, each kind of cut with each type of logits."""
    sizes = [(8, 61)] if machine.small else [(1 << 16, 37), (2_048, 4_099), (64, LARGE)]
    rows: list[Row] = []
    for height, vocab in sizes:
        for dtype in ("float32", "bfloat16"):
            found = [
                differences(
                    seed, height, vocab, dtype, machine.device, tile=(8, 64) if machine.small else None
                )
                for seed in _seeds(machine)
            ]
            rows.append(
                {
                    "vocabulary": vocab,
                    "logits": dtype,
                    "cases": sum(each["cases"] for each in found),
                    "not PyTorch's here": sum(each["differing"] for each in found),
                    "not PyTorch's on a CPU": sum(each["not_cpu"] for each in found),
                    "log-prob off by": max(each["logprob_off"] for each in found),
                }
            )
    for row in rows:
        assert row["not PyTorch's here"] == 0, f"the kernels chose other tokens than PyTorch: {row}"
        assert row["not PyTorch's on a CPU"] == 0, f"this device chose other tokens than a CPU: {row}"
        assert row["log-prob off by"] < NEAR, f"a log-prob is off by more than {NEAR}: {row}"
    return rows


def rows_alone(machine: GpuMachine) -> list[Row]:
    """Compare rows sampled one at a time with the same in a batch."""
    count, vocab = (3, 61) if machine.small else (16, LARGE)
    rows = []
    for seed in _seeds(machine):
        together = differences(seed, count, vocab, "float32", machine.device)["tokens"]
        alone = row_by_row(seed, count, vocab, "float32", machine.device)
        other = sum(one != many for one, many in zip(alone, together, strict=True))
        rows.append({"cuts": _cuts(seed), "rows": count, "differing": other})
        assert not other, f"a row's token depends on its batch: {rows[-1]}"
    return rows


def waits(machine: GpuMachine) -> list[Row]:
    """Count how often the host waits for the device in a step of the sampler."""
    from seer_worker.sampling.fused import fused_choices

    rows = []
    for seed in _seeds(machine):
        case = draw(seed, 4, 61 if machine.small else LARGE, "bfloat16", machine.device)
        fused_choices(**case)  # compiles
        found = 0
        if machine.device == "cuda":
            torch.cuda.synchronize()
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    fused_choices(**case)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            found = sum(WAITED in str(each.message) for each in caught)
        rows.append({"cuts": _cuts(seed), "waits": found})
        assert not found, f"the host waits for the device: {rows[-1]}"
    return rows


def speed(machine: GpuMachine) -> list[Row]:
    """Time a step of the kernels, of PyTorch's path and of a sampler without keys, beside one read."""
    from seer_worker.sampling.fused import fused_choices
    from seer_worker.sampling.keyed import keyed_choices

    vocab = 61 if machine.small else LARGE
    rows = []
    for dtype in ("bfloat16", "float32"):
        for seed in (0, 1):
            for height in (1, 2) if machine.small else (1, 8, 64, 256):
                case = draw(seed, height, vocab, dtype, machine.device)
                logits = case["logits"] = (
                    torch.randn(case["logits"].shape, device=machine.device).mul_(4).to(case["logits"].dtype)
                )
                kernels = seconds(machine, partial(fused_choices, **case))
                read = logits.nbytes / _bandwidth(machine)
                rows.append(
                    {
                        "logits": dtype,
                        "cuts": _cuts(seed),
                        "rows": height,
                        "kernels, us": kernels * 1e6,
                        "PyTorch, us": seconds(machine, partial(keyed_choices, **case)) * 1e6,
                        "without keys, us": seconds(machine, partial(_unkeyed, logits)) * 1e6,
                        "one read, us": read * 1e6,
                        "share of the bandwidth": read / kernels,
                    }
                )
    return rows


def _seeds(machine: GpuMachine) -> range:
    """Return a seed for each kind of cut; in a dry run, of no cuts and of all."""
    return range(0, len(KINDS), len(KINDS) - 1 if machine.small else 1)


def _cuts(seed: int) -> str:
    return " ".join(KINDS[seed % len(KINDS)]) or "none"


def _unkeyed(logits: torch.Tensor) -> torch.Tensor:
    """Sample as engines do: softmax, exponential noise, log-softmax of the token."""
    logits = logits.float()
    noise = torch.empty_like(logits).exponential_()
    chosen = logits.softmax(-1).div_(noise).argmax(-1, keepdim=True)
    return logits.log_softmax(-1).gather(1, chosen)


def _bandwidth(machine: GpuMachine) -> float:
    """Return bytes per second that the device's maker names, of the nearest of those listed."""
    if machine.device != "cuda":
        return 1e10
    major = torch.cuda.get_device_capability()[0]
    return min(TARGETS.values(), key=lambda each: abs(each.capability // 10 - major)).bandwidth


def seconds(machine: GpuMachine, step: Callable[[], Any]) -> float:
    """Return the median time of a step, with the device's work to its end."""
    times = []
    for repeat in range(2 if machine.small else REPEATS + 3):
        start = time.perf_counter()
        step()
        if machine.device == "cuda":
            torch.cuda.synchronize()
        if machine.small or repeat >= 3:
            times.append(time.perf_counter() - start)
    return median(times)
