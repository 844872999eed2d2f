"""``seer sweep``: when does a policy pay, over pressure, the weight of the tail or a setting."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table
from seer_cli.common import debugged, main_options
from seer_cli.output import check_writable, write_json
from seer_cli.tables import print_table, table_console

from seer_core.errors import ConfigError
from seer_lab.drawing import importing_to_draw
from seer_lab.options import POLICY_HELP, choose_policies, workload_options
from seer_lab.recorded import log_files
from seer_lab.sweep import SweptPoint, Value, parse_axis, sweep, swept_workloads

__all__ = ["sweep_command"]


@click.command("sweep", context_settings={"default_map": {"log_level": "warning"}}, epilog=POLICY_HELP)
@main_options
@workload_options
@click.option(
    "--over",
    "axes",
    multiple=True,
    required=True,
    metavar="KEY=VALUE,...",
    help="pressure, instances, scale, a key of --lengths or of a config; once or twice.",
)
@click.option("--plot", type=click.Path(path_type=Path), help="Draw the ratios; .svg or .png.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per point.")
def sweep_command(
    workload: str,
    policies: tuple[str, ...],
    oracles: tuple[str, ...],
    seed: int,
    repeat: int,
    overrides: tuple[str, ...],
    axes: tuple[str, ...],
    plot: Path | None,
    json_file: Path | None,
    **size: Any,
) -> None:
    """Compare policies on WORKLOAD, as `seer sim` does, at each value of --over.

    The table shows each policy's tokens per second over those of the first policy, so a figure above 1 says
    that the policy pays there.

    \b
    Example:
      seer sweep lengths.jsonl --instances 8 --over pressure=0.5,1,2,4 --plot pays.svg
      seer sweep synthetic --over pressure=1,2,4 --over sigma=0.3,0.9,1.5 --repeat 3
      seer sweep lengths.jsonl --over plugin.divided_rollout.chunk_tokens=512,2048
    """
    check_writable(json_file, plot, inputs=[Path(workload), *log_files(Path(workload))])
    found = dict(map(parse_axis, axes))
    if len(found) < len(axes) or len(found) > 2:
        raise ConfigError("give --over once, or twice with two keys")
    chosen = choose_policies(policies, oracles)
    if len(chosen) < 2:
        raise ConfigError("name two policies at least; all others are compared with the first")
    if plot is not None:
        with importing_to_draw(plot, "--plot", "--plot"):
            from seer_lab.sweep_picture import draw_sweep
    workloads = swept_workloads(workload, found, debugged(overrides), **size)
    with _progress() as progress:
        task = progress.add_task("rollouts", total=len(workloads) * len(chosen) * repeat)
        points = sweep(
            workloads,
            chosen,
            range(seed, seed + repeat),
            lambda simulated: progress.update(task, completed=simulated),
        )
    if json_file is not None:
        write_json(json_file, [point.to_json() for point in points])
    if plot is not None:
        draw_sweep(plot, found, points)
    names = [policy.name for policy in chosen]
    console = table_console()
    seeds = "" if repeat == 1 else f"; medians of {repeat} seeds [least, most]"
    console.print(f"{workloads[0].workload.name}: tokens per second, over those of {names[0]}{seeds}")
    for table in tables_of(found, points, names[1:]):
        print_table(table)
    for note in ("times are simulated", *workloads[0].workload.notes):
        console.print(note)


def _progress() -> Progress:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    is_file = not sys.stderr.isatty()
    return Progress(*columns, console=Console(stderr=True), transient=True, disable=is_file)


def tables_of(
    axes: Mapping[str, Sequence[Value]], points: Sequence[SweptPoint], policies: Sequence[str]
) -> list[Table]:
    """Return one table with a column per policy, or over two keys one table per policy."""
    if len(axes) == 1:
        [key] = axes
        table = Table(key, *policies)
        for point in points:
            table.add_row(str(point.at[key]), *(_cell(point, policy) for policy in policies))
        return [table]
    across, down = axes
    tables = []
    for policy in policies:
        table = Table(f"{policy}: {down}", *(f"{across} {value}" for value in axes[across]))
        cells = {tuple(point.at.values()): _cell(point, policy) for point in points}
        for value in axes[down]:
            table.add_row(str(value), *(cells[other, value] for other in axes[across]))
        tables.append(table)
    return tables


def _cell(point: SweptPoint, policy: str) -> str:
    median, least, most = point.ratio(policy)
    return f"{median:.2f}" if least == most else f"{median:.2f} [{least:.2f}, {most:.2f}]"
