"""What it takes to bring a trainer's tensors to `seer serve`: sent over the connection, or shared in memory.

Engines are simulated and load nothing, so this is the way to the server alone: what the client copies,
digests and sends, and what the server receives and digests.  What engines do with them is in
`weight_update.py`.  Tensors are of bfloat16, and of --tensor-megabytes each.  The first update of each way
is left out.

  python benchmarks/client_weights.py --megabytes 100 2000 --repeat 10 --json out/client_weights.json
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from seer_client import Client

from seer_core.figures import spread
from server import CONFIG, PATIENCE_S, cpu_s, serve

WAYS = ("send_weights", "share_weights")


def tensors(megabytes: int, each: int, chance: bytes) -> Iterator[tuple[str, Any]]:
    """Yield named tensors of so many megabytes in all; they share their values."""
    for number in range(-(-megabytes // each)):
        size = 10**6 * min(each, megabytes - number * each)
        yield f"layers.{number}", ("BF16", [size // 2], memoryview(chance)[:size])


def main() -> None:
    """Measure each size in each way by turns."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--megabytes", type=int, nargs="+", default=[100, 1000], help="of all tensors")
    parser.add_argument("--tensor-megabytes", type=int, default=32, help="of each (default 32)")
    parser.add_argument("--repeat", type=int, default=5, help="updates each way (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every update's row")
    arguments = parser.parse_args()
    chance = os.urandom(10**6 * arguments.tensor_megabytes)
    config = Path(tempfile.mkdtemp()) / "seer.toml"
    config.write_text(CONFIG)
    rows: list[dict[str, Any]] = []
    process, url = serve(config)
    try:
        with Client(url, silence_s=PATIENCE_S) as client:
            for megabytes in arguments.megabytes:
                for turn in range(arguments.repeat + 1):
                    for way in WAYS:
                        before, mine, began = cpu_s(process.pid), time.process_time(), time.perf_counter()
                        getattr(client, way)(tensors(megabytes, arguments.tensor_megabytes, chance))
                        seconds = time.perf_counter() - began
                        gigabytes = megabytes / 1e3
                        row = {
                            "way": way,
                            "megabytes": megabytes,
                            "seconds": seconds,
                            "gigabytes_per_s": gigabytes / seconds,
                            "server_cpu_s_per_gigabyte": (cpu_s(process.pid) - before) / gigabytes,
                            "client_cpu_s_per_gigabyte": (time.process_time() - mine) / gigabytes,
                        }
                        rows += [row] if turn else []
    finally:
        process.terminate()
        process.wait(60)
    print(f"{'MB':>6}  {'way':14} {'GB/s':24} {'CPU s/GB, server':24} CPU s/GB, client")
    for megabytes in arguments.megabytes:
        for way in WAYS:
            mine = [row for row in rows if (row["way"], row["megabytes"]) == (way, megabytes)]
            cells = [
                "{:6.2f} [{:.2f}, {:.2f}]".format(*spread(row[key] for row in mine)).ljust(24)
                for key in ("gigabytes_per_s", "server_cpu_s_per_gigabyte", "client_cpu_s_per_gigabyte")
            ]
            print(f"{megabytes:6}  {way:14} {' '.join(cells)}")
    command = shlex.join(["python", *sys.argv])
    print(f"medians and [least, most] of {arguments.repeat}; reproduce: {command}")
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
