"""What a weight update costs, by the way of the weights, phase by phase.

The tiny reasoner's shape, made wider until its checkpoint has about --megabytes, with weights by chance.  A
trainer's two sets of weights go to the engines in turn, by a directory and by shared memory alternately.  The
first update of each, which compiles and allocates, is left out.

  written   by the trainer: the file, or the shared memory with its digest
  kept      by the runtime: the copy of the file with its digest, and all messages
  checked   by the slowest instance, as are the next: names, shapes, and every value
  loaded    into vLLM's model
  packed    for the kernels of the CPU
  proved    that every layer answers by them

  python benchmarks/weight_update.py --megabytes 10 500 --json out/weight_update.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import re
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import structlog
import torch
from equality import EXAMPLE
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.utils.logging import disable_progress_bar

from seer_core import SharedWeights
from seer_core.config import load_config
from seer_core.runtime import Runtime
from seer_core.weights import WeightSpec

LAYERS = 8
PHASES = ("written", "kept", "checked", "loaded", "packed", "proved")

Weights = dict[str, torch.Tensor]
Offer = Callable[[Weights], AbstractContextManager[str | WeightSpec]]


def first_checkpoint(directory: Path, megabytes: float) -> Weights:
    """Write the checkpoint of a model, float32 and tied, of about this size; return its tensors."""
    width = next(
        wide for wide in range(64, 1 << 14, 64) if LAYERS * 12 * wide**2 * 4 / 1e6 >= megabytes or wide > 8192
    )
    config = AutoConfig.from_pretrained(EXAMPLE / "weights")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = width, 3 * width, LAYERS
    config.num_attention_heads, config.num_key_value_heads = width // 32, width // 32
    config.layer_types = ["full_attention"] * LAYERS
    shutil.copytree(EXAMPLE / "weights", directory)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    return {name: parameter.detach() for name, parameter in model.named_parameters()}


def by_directory(directory: Path) -> Offer:
    """Return what writes a file, always the same, as trainers do."""
    directory.mkdir()

    @contextmanager
    def offer(weights: Weights) -> Iterator[str]:
        save_file(weights, directory / "model.safetensors", {"format": "pt"})
        yield str(directory)

    return offer


async def measure(directory: Path, options: argparse.Namespace, megabytes: float) -> list[dict[str, Any]]:
    """Update weights in turn; return the seconds of each phase, a row for each way."""
    one = first_checkpoint(directory / "first", megabytes)
    sets = [one, {name: tensor * 0.5 for name, tensor in one.items()}]
    overrides = [
        f"engine.vllm.model={directory / 'first'}",
        f"engine.vllm.instances={options.instances}",
        f"engine.vllm.log_dir={directory / 'logs'}",
        "engine.vllm.start_timeout_s=600",
        "engine.vllm.kv_cache_bytes=268_435_456",
        "engine.vllm.max_model_tokens=256",
        "seer.plugins=['divided_rollout', 'context_sched']",  # measuring steps for drafts takes minutes
    ]
    config = load_config(EXAMPLE / "demo.toml", [*overrides, *options.set])
    with SharedWeights() as shared:
        ways: dict[str, Offer] = {
            "directory": by_directory(directory / "new"),
            "shared memory": lambda weights: shared.offer(weights.items()),
        }
        seconds: dict[str, list[dict[str, float]]] = {way: [] for way in ways}
        async with Runtime.from_config(config) as runtime:
            for turn in range(options.repeat + 1):
                for way, offer in ways.items():
                    taken = await update(runtime, offer, sets[turn % 2], directory / "logs")
                    seconds[way].append(taken)
    size = sum(tensor.nbytes for tensor in one.values())
    return [
        {"way": way, "megabytes": size / 1e6, "instances": options.instances, "seconds": taken[1:]}
        for way, taken in seconds.items()
    ]


async def update(runtime: Runtime, offer: Offer, weights: Weights, logs: Path) -> dict[str, float]:
    """Update once; return the seconds of each phase."""
    begun = time.perf_counter()
    with offer(weights) as source:
        written = time.perf_counter()
        await runtime.update_weights(source)
        loaded = time.perf_counter()
    slowest = max((told(path) for path in logs.glob("*.log")), key=lambda phases: sum(phases.values()))
    rest = loaded - written - sum(slowest.values())
    return {"written": written - begun, "kept": rest, **slowest, "total": loaded - begun}


def told(path: Path) -> dict[str, float]:
    """Return the seconds of each phase of the last update that an instance's log tells of."""
    found = dict(re.findall(r"\b(checked|loaded|packed|proved)_s=([0-9.e-]+)", path.read_text("utf-8")))
    return {phase: float(seconds) for phase, seconds in found.items()}


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10.0], help="of a checkpoint")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=10, help="updates each way (default 10)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    disable_progress_bar()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    rows = []
    heads = "".join(f"{phase:>9}" for phase in (*PHASES, "total"))
    print(f"{'MB':>5}  {'way':<14}{heads}   [least, most]")
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as directory:
            for row in asyncio.run(measure(Path(directory), options, megabytes)):
                rows.append(row)
                show(row)
    print(f"medians, in seconds; Python {platform.python_version()}; {shlex.join(['python', *sys.argv])}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


def show(row: dict[str, Any]) -> None:
    """Print a row of medians, and the least and most of the totals."""
    totals = [each["total"] for each in row["seconds"]]
    medians = [statistics.median(each[phase] for each in row["seconds"]) for phase in (*PHASES, "total")]
    print(
        f"{row['megabytes']:>5.0f}  {row['way']:<14}"
        + "".join(f"{seconds:>9.4f}" for seconds in medians)
        + f"   [{min(totals):.3f}, {max(totals):.3f}]",
        flush=True,
    )


if __name__ == "__main__":
    main()
