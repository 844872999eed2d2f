"""``seer explain``: what happened to one request of a run, in words."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import click
import msgspec
from rich.table import Table
from seer_trace.records import TraceRecord, read_trace
from seer_trace.request_life import LifeReader, RequestLife

from seer_cli.common import main_options
from seer_cli.output import JSON_OPTION, TRACE, InputPath, check_writable, write_json
from seer_cli.request_wording import COLUMNS_OF_LIFE, beginning, rows_of_life, sums
from seer_cli.tables import print_table, prose
from seer_core.errors import InputError, quote
from seer_core.model.events import GroupsSubmitted

__all__ = ["explain_command", "life_of"]


@click.command("explain")
@main_options
@click.argument("directory", type=InputPath())
@click.argument("request")
@JSON_OPTION
def explain_command(directory: Path, request: str, json_file: Path | None) -> None:
    """Say what happened to REQUEST, GROUP/INDEX, in the run of DIRECTORY: when it waited, for what, and where
    it ran.

    A wait is for a slot while every instance runs as many requests as it may, for KV while no instance with a
    free slot has room for the next chunk, and for its turn while one has: others were preferred.

    \b
    Example:
      seer explain out/first g17/3
    """
    check_writable(json_file)
    life = life_of(request, read_trace(directory / TRACE))
    if json_file is not None:
        more = {"tokens": life.tokens, "earlier_tokens": life.earlier_tokens, "waited_s": life.waited_s()}
        write_json(json_file, msgspec.to_builtins(life) | more)
    click.echo(beginning(life))
    at, for_, *others = COLUMNS_OF_LIFE
    table = Table(at, for_, *map(prose, others))
    for row in rows_of_life(life):
        table.add_row(*row)
    print_table(table, keys=2)
    click.echo(sums(life))


def life_of(request_id: str, records: Iterable[TraceRecord]) -> RequestLife:
    """Return the life of a request, ``GROUP/INDEX``.

    Raises:
        InputError: the trace has no such request.
    """
    reader = LifeReader(only=request_id)
    groups: list[str] = []
    for record in records:
        if isinstance(record.event, GroupsSubmitted):
            groups += [each.id for each in record.event.groups[: max(0, 3 - len(groups))]]
        for life in reader.read(record.now, record.event, record.commands):
            return life
    for life in reader.rest():
        return life
    named = ", ".join(quote(f"{each}/0") for each in groups)
    raise InputError(
        f"the trace has no request {quote(request_id)}; name one as GROUP/INDEX"
        + (f", like {named}" if named else "")
    )
