"""``seer shadow``: the time that a framework's steps would have taken under Seer."""

from __future__ import annotations

from pathlib import Path

import click
import msgspec
from rich.table import Table
from seer_cli.common import main_options
from seer_cli.output import InputPath, check_writable, write_json
from seer_cli.tables import print_table, table_console

from seer_lab.shadow import REQUEST_S, ShadowStep, read_watched, shadow

__all__ = ["shadow_command"]


@click.command("shadow", context_settings={"default_map": {"log_level": "warning"}})
@main_options
@click.argument("record", type=InputPath())
@click.option("--servers", type=click.IntRange(1), help="Servers that there are, if some were idle.")
@click.option(
    "--max-running",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Requests that a server decodes at a time.",
)
@click.option("--kv-tokens", type=click.IntRange(0), default=0, help="Tokens whose KV a server holds.")
@click.option("--json", "json_file", type=click.Path(path_type=Path), help="Write one object per step.")
def shadow_command(
    record: Path, servers: int | None, max_running: int, kv_tokens: int, json_file: Path | None
) -> None:
    """Say what the steps of RECORD, which another scheduler has placed, would have taken under Seer.

    RECORD is what `seer serve --watch`, or verl with mode=shadow, has written: lengths and times of requests.
    The costs of a server's step are fitted to earlier steps, and the error is that of the same costs for what
    the other scheduler did. The first step is fitted to itself.

    \b
    Example:
      SEER=off seer serve front.toml --port 8000 --watch watched.jsonl
      seer shadow watched.jsonl
    """
    check_writable(json_file, inputs=[])
    found = shadow(read_watched(record), servers=servers, max_running=max_running, kv_tokens=kv_tokens)
    if json_file is not None:
        rows = [msgspec.to_builtins(each) | {"error": each.error, "saved": each.saved} for each in found]
        write_json(json_file, rows)
    _print(found)


def _print(found: list[ShadowStep]) -> None:
    table = Table()
    for title in ("step", "requests", "measured, s", "replayed, s", "error", "under Seer, s", "saved"):
        table.add_column(title, justify="right", no_wrap=True)
    for each in found:
        error = "fitted to it" if each.own_costs else f"{each.error:+.1%}"
        table.add_row(
            str(each.step),
            str(each.requests),
            f"{each.measured_s:,.1f}",
            f"{each.replayed_s:,.1f}",
            error,
            "{:,.1f} [{:,.1f}, {:,.1f}]".format(each.seer_s, *each.seer_range_s),
            f"{each.saved:.0%}",
        )
    print_table(table, keys=1)
    table_console().print(
        "replayed: predicted for what was done, with the costs of the steps before; under Seer: the mean of"
        f" {len(REQUEST_S)} simulations, with the least and the most; a saving that is no larger than the"
        " error says nothing"
    )
