"""How far the layouts of the trainer `megatron` are from the trainer `torch`, and how fast they are.

Every layout learns the same made-up samples from the same first weights, a few times. What is shown against
`torch`: the largest relative difference of loss and norm of the gradient in any of the calls, the largest
difference of a weight at the end, and the median seconds of a call. A layout is written as tensor x pipeline
x data parallel.

    python benchmarks/megatron_layouts.py --json out/megatron_layouts.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from seer_rl.config import MegatronTable, OptimizerTable, TorchTable, TrainTable
from seer_rl.megatron import MegatronTrainer
from seer_rl.torch_trainer import TorchTrainer
from seer_rl.trainer import Sample

MODEL = Path(__file__).parents[1] / "examples" / "tiny_reasoner" / "weights"
LAYOUTS = ("1x1x1", "2x1x1", "1x2x1", "1x1x2")


def main(arguments: argparse.Namespace) -> None:
    """Train in each layout, compare, report."""
    samples = make_samples(arguments.samples, arguments.tokens)
    columns = ("loss", "grad_norm", "weights", "train_s", "start_s")
    print(f"{'layout':<10}" + "".join(f"{column:>12}" for column in columns), flush=True)
    plain = learn("torch", samples, arguments)
    rows = []
    for layout in ("torch", *arguments.layouts):
        row = compare(plain if layout == "torch" else learn(layout, samples, arguments), plain)
        apart = "".join(f"{row[column]:>12.1e}" for column in columns[:3])
        seconds = "".join(f"{row[column]:>12.2f}" for column in columns[3:])
        print(f"{layout:<10}{apart}{seconds}", flush=True)
        rows.append(row)
    print(f"{sum(len(each.response) for each in samples):,} tokens to learn, {arguments.times} times")
    if arguments.json:
        machine = {"cpus": os.cpu_count(), "python": platform.python_version()}
        arguments.json.write_text(json.dumps({"machine": machine, "rows": rows}, indent=1) + "\n", "utf-8")


def make_samples(count: int, tokens: int) -> list[Sample]:
    """Return samples of various lengths, half of them better than the others."""
    dice = random.Random(0)
    samples = []
    for number in range(count):
        length = dice.randrange(tokens // 2, tokens * 3 // 2)
        prompt, response = ([dice.randrange(3, 96) for _ in range(size)] for size in (40, length))
        samples.append(Sample(prompt, response, [-4.0] * length, (-1.0) ** number))
    return samples


def learn(layout: str, samples: Sequence[Sample], arguments: argparse.Namespace) -> dict[str, Any]:
    """Train in a layout; return metrics, weights and seconds."""
    parts = (1, 1, 1) if layout == "torch" else tuple(map(int, layout.split("x")))
    table = TrainTable(
        "",
        "",
        optimizer=OptimizerTable(learning_rate=arguments.learning_rate),
        torch=TorchTable(packed=arguments.packed),
        megatron=MegatronTable(*parts),
    )
    began = time.monotonic()
    with ExitStack() as stack, tempfile.TemporaryDirectory() as folder:
        if layout == "torch":
            trainer: Any = TorchTrainer(table, MODEL, 0)
        else:
            trainer = stack.enter_context(MegatronTrainer(table, MODEL, 0))
        times = [time.monotonic()]
        metrics = []
        for _ in range(arguments.times):
            metrics.append(trainer.train(samples))
            times.append(time.monotonic())
        trainer.export(Path(folder))
        weights: dict[str, Any] = {}
        for file in Path(folder).glob("*.safetensors"):
            weights |= load_file(file)
    seconds = [end - start for start, end in pairwise(times)]
    return {
        "layout": layout,
        "metrics": metrics,
        "weights": weights,
        "train_s": statistics.median(seconds),
        "start_s": times[0] - began,
    }


def compare(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, Any]:
    """Return how far a layout is from what is expected."""
    apart = {
        name: max(
            abs(one[name] / other[name] - 1)
            for one, other in zip(found["metrics"], expected["metrics"], strict=True)
        )
        for name in ("loss", "grad_norm")
    }
    weights = max(
        (found["weights"][name] - expected["weights"][name]).abs().max().item()
        for name in expected["weights"]
    )
    seconds = {name: found[name] for name in ("train_s", "start_s")}
    return {"layout": found["layout"], **apart, "weights": weights, **seconds}


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--layouts", nargs="+", default=LAYOUTS, metavar="TxPxD", help="which to try")
    parser.add_argument("--samples", type=int, default=64, help="of a call (default 64)")
    parser.add_argument("--tokens", type=int, default=150, help="of a response, on average (default 150)")
    parser.add_argument("--times", type=int, default=4, help="calls (default 4)")
    parser.add_argument("--learning-rate", type=float, default=3e-4, help="of AdamW (default 3e-4)")
    parser.add_argument("--packed", action="store_true", help="all samples of a micro-batch in one row")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    main(parser.parse_args())
