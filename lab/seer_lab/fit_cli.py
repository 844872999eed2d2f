"""``seer fit``: a cost model from measured times per output token, and how far its predictions are off."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import click
import msgspec
from rich.table import Table
from seer_cli.common import main_options
from seer_cli.output import InputPath, check_writable, write_json
from seer_cli.tables import print_table, table_console
from seer_sim.machines import cost_on
from seer_sim.sizes import read_sizes

from seer_lab.step_fit import Errors, Held, StepFit, errors_of, fit_steps, held_out
from seer_lab.step_rows import COLUMNS, StepRow, aside, gpu_of, read_rows

__all__ = ["fit_command"]

WIDTH = max(map(len, COLUMNS)) + 2

COLUMN_HELP = "\b\nColumns of FILE; others may be there, for --where:\n" + "\n".join(
    f"  {name:<{WIDTH}}{about}" for name, about in COLUMNS.items()
)


@click.command("fit", context_settings={"default_map": {"log_level": "warning"}}, epilog=COLUMN_HELP)
@main_options
@click.argument("file", type=InputPath())
@click.option(
    "--model",
    required=True,
    type=InputPath(),
    metavar="DIR",
    help="The model's directory, or its config.json.",
)
@click.option(
    "--gpu", default="", metavar="NAME", help="h100, h200, h800, a100 or b200, where no column says."
)
@click.option("--where", multiple=True, metavar="COLUMN=VALUE", help="Only these rows; may repeat.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write the fit as one object.")
def fit_command(file: Path, model: Path, gpu: str, where: tuple[str, ...], json_file: Path | None) -> None:
    """Fit the simulator's cost model to measured times per output token, and test it on rows left out.

    FILE is a CSV of a serving benchmark with a constant number of requests in flight, such as vLLM's,
    SGLang's or AIConfigurator's.  Rows of several numbers of GPUs are fitted together.  Each half of the
    rows is predicted by a fit to the other, and each number of GPUs by a fit to the others.  Rows that do
    not measure a step of their batch are set aside, each with its reason.

    \b
    Example:
      seer fit measured.csv --model my_model --gpu h100 --json fitted.json
      seer fit silicon.csv --model my_model --where model_path=me/my_model --where backend=vllm
      seer sim lengths.jsonl --model my_model --gpus 4 --reached fitted.json --policy verl --policy seer
    """
    check_writable(json_file, inputs=[file, model])
    sizes = read_sizes(model)
    rows, system = read_rows(file, where)
    peaks = gpu_of(gpu or system or "h100")
    left = dict(aside(rows, sizes, peaks))
    kept = [row for row in rows if row not in left]
    fitted = fit_steps(kept, sizes, peaks)
    errors = errors_of(fitted, kept, sizes, peaks)
    held = list(held_out(kept, sizes, peaks))
    if json_file is not None:
        costs = {str(gpus): cost_on(sizes, peaks, gpus, fitted.reached) for gpus in _gpus(kept)}
        write_json(
            json_file,
            {
                "reached": msgspec.to_builtins(fitted.reached),
                "seen": fitted.seen,
                "errors": msgspec.to_builtins(errors),
                "held_out": msgspec.to_builtins(held),
                "aside": [{**row._asdict(), "reason": reason} for row, reason in left.items()],
                "cost": {gpus: msgspec.to_builtins(cost) for gpus, cost in costs.items()},
            },
        )
    _print(fitted, errors, held, left)


def _gpus(rows: Sequence[StepRow]) -> list[int]:
    return sorted({row.gpus for row in rows})


def _print(fitted: StepFit, errors: Errors, held: Sequence[Held], left: dict[StepRow, str]) -> None:
    console = table_console()
    table = Table("rows", "number", "mean error", "worst error")
    table.add_row("fitted", str(errors.rows), f"{errors.mean:.1%}", f"{errors.worst:.1%}")
    for each in held:
        found = each.errors
        table.add_row(f"{each.what}, left out", str(found.rows), f"{found.mean:.1%}", f"{found.worst:.1%}")
    print_table(table)
    reached = msgspec.to_builtins(fitted.reached)
    console.print("reached: " + ", ".join(f"{name} {value:.3g}" for name, value in reached.items()))
    console.print(f"{fitted.seen:.0%} of others' prompts are computed between a response's tokens")
    for row, reason in left.items():
        console.print(
            f"set aside: batch {row.batch}, {row.prompt_tokens} + {row.response_tokens} tokens,"
            f" {row.gpus} GPUs, {row.seconds * 1e3:.2f} ms: {reason}"
        )
