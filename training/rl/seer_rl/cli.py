"""``seer train``."""

from __future__ import annotations

from pathlib import Path

import click
from seer_cli.common import debugged, main_options, set_option, without_option
from seer_cli.output import InputPath, check_writable
from seer_cli.report.options import DASHBOARD_OPTION

from seer_core.errors import ConfigError, printable
from seer_rl.config import load_training
from seer_rl.display import TrainDisplay
from seer_rl.metrics import METRICS
from seer_rl.training_run import train

__all__ = ["train_command"]


@click.command("train", context_settings={"default_map": {"log_level": "warning"}})
@main_options
@click.argument("config", type=InputPath())
@click.option("--out", required=True, type=click.Path(path_type=Path), help="Directory for the results.")
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in --out, or begin.")
@DASHBOARD_OPTION
@click.option(
    "--report",
    type=click.Path(path_type=Path, dir_okay=False),
    metavar="FILE",
    help="Write a page of the latest rollouts after each, as `seer report` does.",
)
@set_option
@without_option
def train_command(
    config: Path,
    out: Path,
    resume: bool,
    dashboard_port: int | None,
    report: Path | None,
    overrides: tuple[str, ...],
    disabled: tuple[str, ...],
) -> None:
    """Train a model by GRPO on the rollouts of CONFIG, which has a [train] table beside those of `seer run`.

    Each iteration rolls out, computes rewards meanwhile, trains, and gives the engines the new weights.

    \b
    Writes into --out:
      metrics.jsonl   a line per iteration: reward, loss, log-prob agreement, digests, seconds per phase
      checkpoints/    the last ones, whole models with what --resume needs
      weights/        what the engines load, unless [train].weights is shared_memory
      training.png    reward and phase times, drawn at the end
      tensorboard/    event files, with [train.tracking].tensorboard = true

    After Ctrl-C, or SIGKILL at any moment, --resume goes on with the same losses.

    \b
    Example:
      seer train examples/tiny_rl/train.toml --out out/tiny_rl
      seer train examples/tiny_rl/train.toml --out out/tiny_rl --resume --set train.iterations=40
    """
    for text in disabled:
        if not text.startswith("no:"):
            raise ConfigError(f"-p {text}: only no:NAME is understood; enable plug-ins in [seer].plugins")
    without = [text.removeprefix("no:") for text in disabled]
    table, settings = load_training(config, debugged(overrides), without)
    check_writable(report)
    with TrainDisplay(table.iterations) as listener:
        latest = train(table, settings, out, listener, resume=resume, report=report, dashboard=dashboard_port)
    if latest is None:
        click.echo(f"all {table.iterations} iterations are done; give more with --set train.iterations=N")
    else:
        click.echo(f"model in {printable(str(latest))}, metrics in {printable(str(out / METRICS))}")
