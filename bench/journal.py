"""What does the journal cost: time of a rollout, CPU of its process, and bytes per token?

Engines without a model write a token of each response every 10 ms, in chunks of 64, so that a rollout's time
is theirs unless the process of the scheduler falls behind.  The slow disk takes 50 ms for every sync.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import product
from pathlib import Path
from unittest import mock

from seer_cli.stats import ratios
from seer_divided_rollout import Chunks
from seer_journal import DiskJournal, Safety

from bench.frame import ROOT, Row, cell, markdown, spread_of, turned
from seer_core.model import PromptGroup
from seer_core.plugins.loading import Assembly, Strategies
from seer_core.runtime.runtime import Runtime
from seer_core.scheduling.scheduler import Policies, Slot

ROOMS = ("seer_core", "plugins/journal", "examples/plugins/engines")
ROUNDS = 5
TOKEN_S = 0.01
SYNC_S = 0.05
MOST_TOKENS = 600
KINDS = ("none", "system", "disk", "slow disk")


def options(parser: argparse.ArgumentParser) -> None:
    """Add the case's own options."""
    parser.add_argument("--responses", type=int, nargs="+", default=[1, 64, 1000], help="at a time")
    parser.add_argument("--directory", type=Path, help="of the journal (default: a temporary one)")


async def run(options: argparse.Namespace) -> list[Row]:
    """Roll out with each kind of journal in every round."""
    arms = list(product(options.responses, KINDS))
    times: dict[tuple[int, str], list[float]] = {arm: [] for arm in arms}
    cpu: dict[tuple[int, str], list[float]] = {arm: [] for arm in arms}
    size: dict[tuple[int, str], float] = {}
    for number, arm in turned(arms, options.rounds):
        with (
            tempfile.TemporaryDirectory(dir=options.directory) as directory,
            _journal(arm[1], directory) as journal,
        ):
            async with _runtime(arm[0]) as runtime:
                groups = [
                    PromptGroup(f"{each}", (5, each), 1, MOST_TOKENS, seed=each) for each in range(arm[0])
                ]
                began, began_cpu = time.perf_counter(), time.process_time()
                rollout = runtime.rollout(groups, keep=False, journal=journal)
                async for _ in rollout:
                    pass
                times[arm].append(time.perf_counter() - began)
                cpu[arm].append(time.process_time() - began_cpu)
                if journal is not None:
                    size[arm] = journal.written_bytes / rollout.result.summary.tokens
        print(f"round {number + 1}, {arm[0]} responses, journal: {arm[1]}", file=sys.stderr, flush=True)
    return [
        {
            "responses": responses,
            "journal": kind,
            "time_s": spread_of(taken),
            "time_to_none": spread_of(ratios(taken, times[responses, "none"])),
            "cpu_share": spread_of(
                used / wall for used, wall in zip(cpu[responses, kind], taken, strict=True)
            ),
            "bytes_per_token": size.get((responses, kind)),
        }
        for (responses, kind), taken in times.items()
    ]


def _runtime(responses: int) -> Runtime:
    sys.path.insert(0, str(ROOT / "examples" / "plugins" / "engines"))
    from seer_no_model import NoModelFleet, Settings

    fleet = NoModelFleet(Settings(instances=-(-responses // 64), token_s=TOKEN_S))
    return Runtime(Assembly(fleet, Strategies(Policies(splitter=Slot("splitter", "bench", Chunks(64))))))


@contextmanager
def _journal(kind: str, directory: str) -> Iterator[DiskJournal | None]:
    if kind == "none":
        yield None
        return
    sync = os.fdatasync

    def slowly(file: int) -> None:
        time.sleep(SYNC_S)
        sync(file)

    safety: Safety = "system" if kind == "system" else "disk"
    patched = mock.patch.object(os, "fdatasync", slowly if kind == "slow disk" else sync)
    with DiskJournal(Path(directory) / "journal", safety=safety) as journal, patched:
        yield journal


def table(rows: Sequence[Row]) -> str:
    """Return one line for each kind of journal and number of responses."""
    columns = ["journal", "responses at a time", "time, s", "to none", "CPU of a core", "bytes per token"]
    lines = [
        [
            row["journal"],
            f"{row['responses']:,}",
            cell(row["time_s"], ".2f"),
            cell(row["time_to_none"], ".3f", "x"),
            cell(row["cpu_share"], ".1%"),
            f"{row['bytes_per_token']:.2f}" if row["bytes_per_token"] else "",
        ]
        for row in rows
    ]
    return markdown(columns, lines)


def answer(rows: Sequence[Row]) -> str:
    """Return what a journal on disk costs in time and bytes."""
    disk = [row for row in rows if row["journal"] == "disk"]
    slowest = max(row["time_to_none"]["median"] for row in disk)
    sizes = [row["bytes_per_token"] for row in disk]
    return (
        f"With a journal on disk a rollout takes at most {slowest:.3f}x the time of one without, and a token"
        f" takes {min(sizes):.1f} to {max(sizes):.1f} bytes."
    )
