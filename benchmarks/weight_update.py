"""What a weight update costs: seconds from `update_weights` to all instances serving the new version.

The tiny reasoner's shape, made wider until its checkpoint has about --megabytes, with weights by chance; two
checkpoints of it are loaded in turn.  The first update, which compiles and allocates, is left out.

  python benchmarks/weight_update.py --megabytes 10 500 --json out/weight_update.json
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import structlog
from equality import EXAMPLE
from transformers import AutoConfig, AutoModelForCausalLM

from seer_core.config import load_config
from seer_core.runtime import Runtime

LAYERS = 8


def checkpoints(directory: Path, megabytes: float) -> list[Path]:
    """Write two checkpoints of one model, float32 and tied, of about this size."""
    width = next(
        wide for wide in range(64, 1 << 14, 64) if LAYERS * 12 * wide**2 * 4 / 1e6 >= megabytes or wide > 8192
    )
    config = AutoConfig.from_pretrained(EXAMPLE / "weights")
    config.hidden_size, config.intermediate_size, config.num_hidden_layers = width, 3 * width, LAYERS
    config.num_attention_heads, config.num_key_value_heads = width // 32, width // 32
    config.layer_types = ["full_attention"] * LAYERS
    found = []
    for name in ("one", "other"):
        shutil.copytree(EXAMPLE / "weights", directory / name)
        AutoModelForCausalLM.from_config(config).save_pretrained(directory / name)
        found.append(directory / name)
    return found


async def measure(directory: Path, options: argparse.Namespace, megabytes: float) -> dict[str, Any]:
    """Update weights in turn, and return what it took."""
    weights = checkpoints(directory, megabytes)
    overrides = [
        f"engine.vllm.model={weights[0]}",
        f"engine.vllm.instances={options.instances}",
        "engine.vllm.kv_cache_bytes=268_435_456",
        "engine.vllm.max_model_tokens=256",
    ]
    config = load_config(EXAMPLE / "demo.toml", [*overrides, *options.set])
    seconds = []
    async with Runtime.from_config(config) as runtime:
        for turn in range(options.repeat + 1):
            begun = time.perf_counter()
            await runtime.update_weights(str(weights[(turn + 1) % 2]))
            seconds.append(time.perf_counter() - begun)
    size = sum(file.stat().st_size for file in weights[0].glob("*.safetensors"))
    return {"megabytes": size / 1e6, "instances": options.instances, "seconds": seconds[1:]}


def main() -> None:
    """Measure each size."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=float, nargs="+", default=[10.0], help="of a checkpoint")
    parser.add_argument("--instances", type=int, default=2)
    parser.add_argument("--repeat", type=int, default=10, help="updates (default 10)")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="as for seer run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows as JSON")
    options = parser.parse_args()
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.CRITICAL))
    rows = []
    for megabytes in options.megabytes:
        with tempfile.TemporaryDirectory() as directory:
            row = asyncio.run(measure(Path(directory), options, megabytes))
        rows.append(row)
        times = row["seconds"]
        print(
            f"{row['megabytes']:.0f} MB, {row['instances']} instances: {statistics.median(times):.3f} s"
            f" [{min(times):.3f}, {max(times):.3f}]",
            flush=True,
        )
    print(f"Python {platform.python_version()}; {shlex.join(['python', *sys.argv])}")
    if options.json:
        options.json.parent.mkdir(parents=True, exist_ok=True)
        options.json.write_text(json.dumps(rows, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
