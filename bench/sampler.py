"""What do the sampler's kernels need on a GPU: registers, memory and time, by compiling them?

Triton compiles the kernels of keyed sampling for three generations of GPUs, on a machine without one, as they
are launched: eight warps, no fusion of multiplications with additions.  ptxas says how many registers a
thread has, and whether any are spilled to memory.  Only ``join``, which makes log-probs, may fuse, in a
logarithm of a library.  The machine code is counted: instructions per logit, of which the hash and two
logarithms are nearly all.  Times are on paper: reading each logit once at the memory's full bandwidth, and
issuing all instructions without a gap.  The larger of the two is a lower bound, and their ratio the share of
the bandwidth that the kernel can reach.  The times of an H100 stand in gpu-h100.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from bench.frame import Row, markdown
from bench.gpu.compiled import KERNELS, VOCAB, compiled
from bench.gpu.devices import TARGETS, least_time

ROOMS = (
    "backends/worker/seer_worker/sampling/kernels.py",
    "backends/worker/seer_worker/sampling/fused.py",
    "bench/gpu/compiled.py",
    "bench/gpu/devices.py",
)
ROUNDS = 1
ROWS = (1, 64, 256)


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options: none."""


def run(options: argparse.Namespace) -> list[Row]:
    """Compile each kernel for each target."""
    return [compiled(name, target) for target in TARGETS for name in KERNELS]


def answer(rows: Sequence[Row]) -> str:
    """Return the most registers, the spills, and the bound for a large batch."""
    most = max(row["registers"] for row in rows)
    spilled = sum(row["spilled"] for row in rows)
    bounds = []
    for row in rows:
        if row["kernel"] == "score":
            times = least_time(TARGETS[row["target"]], ROWS[-1] * VOCAB, 2, row["per_logit"])
            bounds.append(f"{max(times) * 1e3:.2f} ms on {row['target']}")
    return (
        f"At most {most} registers, {spilled} bytes spilled; {ROWS[-1]} rows of {VOCAB:,} logits take at"
        f" least {', '.join(bounds)}, on paper."
    )


def table(rows: Sequence[Row]) -> str:
    """Return the compiled kernels, and below them the bounds of plain sampling."""
    kernels = markdown(
        ("GPU", "kernel", "registers", "spilled, bytes", "shared memory, bytes", "per logit", "fused"),
        (
            (
                row["target"],
                row["kernel"],
                *(f"{row[name]:,}" for name in ("registers", "spilled", "shared")),
                "" if row["per_logit"] is None else f"{row['per_logit']:.0f}",
                str(row["fused"]),
            )
            for row in rows
        ),
        left=2,
    )
    plain = {row["target"]: row["per_logit"] for row in rows if row["kernel"] == "score"}
    lines = []
    for name, target in TARGETS.items():
        for count in ROWS:
            for kind, itemsize in (("bfloat16", 2), ("float32", 4)):
                read, issue = least_time(target, count * VOCAB, itemsize, plain[name])
                share = f"{read / max(read, issue):.0%}"
                size = f"{count * VOCAB * itemsize / 1e6:,.1f}"
                times = (f"{read * 1e6:,.1f}", f"{issue * 1e6:,.1f}")
                lines.append((f"{name}, {target.device}", kind, str(count), size, *times, share))
    columns = ("GPU", "logits", "rows", "MB", "to read, us", "to issue, us", "of the bandwidth")
    return f"{kernels}\n\n{markdown(columns, lines, left=2)}"
