"""The sampler's CPU time and its kernels, for ``device_steps``: ``python bench/sampler_steps.py ...``.

Prints a JSON line for each kind of cut: the CPU seconds of one choice, the least of all repeats, without a
GPU and on one thread.  With --kernels it prints one for each kernel, compiled for a GPU that need not be
there.  Of this package it imports ``gpu`` alone, that of the checkout on the path.
"""

from __future__ import annotations

import argparse
import json
from time import process_time

import torch

VOCAB = 151_936
"""The vocabulary of the Qwen models."""
SPREAD = 4.0
"""The standard deviation of logits, as ``gpu-check`` draws them."""
CUTS = {"none": {}, "top-p": {"top_p": 0.9}, "top-k": {"top_k": 50}, "both": {"top_k": 50, "top_p": 0.9}}
CUTS |= {"top-p 0.5": {"top_p": 0.5}}


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
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--kernels", metavar="TARGET", help="compile for it, and take no times")
    options = parser.parse_args()
    if options.kernels:
        print_kernels(options.kernels)
    else:
        print_times(options.rows, options.repeats)


if __name__ == "__main__":
    main()
