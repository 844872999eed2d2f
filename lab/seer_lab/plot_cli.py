"""``seer plot``: a picture of finished runs, from their traces."""

from __future__ import annotations

from pathlib import Path

import click
from seer_cli.common import main_options
from seer_cli.output import check_writable, names_of_runs
from seer_trace.records import read_trace

from seer_lab.chunk_bars import bars_of
from seer_lab.drawing import importing_to_draw

__all__ = ["plot_command"]


@click.command("plot")
@main_options
@click.argument("directories", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="DIR...")
@click.option(
    "--out",
    required=True,
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The picture; .svg or .png.",
)
def plot_command(directories: tuple[Path, ...], out: Path) -> None:
    """Draw the rollouts of finished runs, one above the other: which chunk ran where, and when.

    Each DIR is the --out of a `seer run`.  Instances are rows, chunks
    are bars, and the tail, in which only the last tenth of the responses is left, is shaded.

    \b
    Example:
      seer run rollout.toml --prompts prompts.jsonl --out out/seer
      seer run rollout.toml --prompts prompts.jsonl --out out/verl --set "seer.plugins=['group_round_robin']"
      seer plot out/verl out/seer --out rollouts.png
    """
    with importing_to_draw(out, "--out", "`seer plot`"):
        from seer_lab.rollout_picture import draw_rollouts
    check_writable(out, inputs=directories)
    traces = [read_trace(directory / "trace.jsonl") for directory in directories]
    draw_rollouts(out, dict(zip(names_of_runs(directories), map(bars_of, traces), strict=True)))
    click.echo(f"picture in {out}")
