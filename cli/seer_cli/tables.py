"""Tables that are printed whole: no name and no number in them is cut, however narrow the terminal is."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from rich.cells import cell_len
from rich.console import Console
from rich.table import Column, Table

__all__ = ["print_table", "prose", "table_console"]

PLAIN_WIDTH = 130
"""Columns of a table where there is no terminal."""
LEAST_PROSE = 16
"""The fewest columns that prose gets."""
FRAME = 3
"""Columns that a table's frame takes for each of its own."""


def table_console() -> Console:
    """Return a console for standard output; without a terminal it breaks no line."""
    is_terminal = sys.stdout.isatty()
    width = None if is_terminal else PLAIN_WIDTH
    return Console(highlight=False, markup=False, emoji=False, width=width, soft_wrap=not is_terminal)


def prose(title: str) -> Column:
    """Return a column of text that is wrapped where the terminal is narrow."""
    return Column(title, overflow="fold")


def print_table(table: Table, keys: int = 1) -> None:
    """Print a table in as many parts as its width takes, each with the first ``keys`` columns.

    Cells are text.  Columns of ``prose`` are wrapped; others are as wide as their
    widest cell, also where the terminal is narrower than that.
    """
    width = table_console().width
    for column in table.columns:
        column.no_wrap = column.overflow != "fold"
    for part in _parts(table, keys, width):
        wide = max(width, _width(part.columns))
        Console(highlight=False, markup=False, emoji=False, width=wide).print(part)


def _parts(table: Table, keys: int, width: int) -> Iterator[Table]:
    """Yield tables with the key columns and as many of the others as there is room for, one at least."""
    first, rest = table.columns[:keys], table.columns[keys:]
    title = table.title
    while True:
        count = len(rest)
        while count > 1 and _width([*first, *rest[:count]]) > width:
            count -= 1
        part = Table(title=title, title_justify=table.title_justify)
        for column in (shown := [*first, *rest[:count]]):
            part.add_column(
                column.header, justify=column.justify, no_wrap=column.no_wrap, overflow=column.overflow
            )
        for row in zip(*(column.cells for column in shown), strict=True):
            part.add_row(*row)
        rest, title = rest[count:], None
        if not rest:
            part.caption = table.caption
            yield part
            return
        yield part


def _width(columns: list[Column]) -> int:
    """Return the columns of a terminal that these columns of a table take at least."""
    return sum(_least(column) + FRAME for column in columns) + 1


def _least(column: Column) -> int:
    cells = (column.header, *column.cells)
    widest = max((cell_len(line) for each in cells for line in str(each).splitlines()), default=0)
    return min(widest, LEAST_PROSE) if column.overflow == "fold" else widest
