"""Options and output that the benchmarks of simulated policies have in common."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

__all__ = ["add_options", "report"]


def add_options(parser: argparse.ArgumentParser, seeds: int, what: str) -> None:
    """Add the options that choose iterations, config and output; ``what`` says what the ``seeds`` count."""
    parser.add_argument("--seeds", type=int, default=seeds, help=what)
    parser.add_argument("--first-seed", type=int, default=0, help="the first of them")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change the config of every run"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the rows to a file, too")


def report(command: str, rows: Sequence[dict[str, Any]], file: Path | None) -> None:
    """Say how to get these rows again, and write them to a file if there is one."""
    print(f"reproduce: {command}")
    if file:
        file.write_text(json.dumps({"command": command, "rows": rows}, indent=1) + "\n")
