"""Tables are printed whole, on narrow terminals and in files."""

import re

import pytest
from rich.cells import cell_len
from rich.table import Table
from seer_cli import tables
from seer_cli.tables import print_table, prose

NAMES = ["a_technique_with_a_long_name", "another_technique_of_the_config", "third"]


@pytest.fixture
def printed(capsys, monkeypatch):
    """Return a function that prints a table on a terminal of a width, or on none, and returns the lines."""

    def printed(table, width, keys=1):
        monkeypatch.setattr(tables.sys.stdout, "isatty", lambda: width is not None, raising=False)
        monkeypatch.setenv("COLUMNS", str(width or 60))
        print_table(table, keys)
        return re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out).splitlines()

    return printed


def figures():
    table = Table("figure", "kind", *NAMES, title="figures", caption="that is all")
    table.add_row("tokens", "measured", "1,234,567", "[1,234,567, 2,345,678]", "3")
    table.add_row("preemptions", "predicted", "12", "13", "14")
    return table


@pytest.mark.parametrize("width", [None, 200])
def test_a_table_is_one_where_there_is_room_and_in_a_file(printed, width):
    lines = printed(figures(), width)
    assert sum("figure " in line for line in lines) == 1
    assert all(name in " ".join(lines) for name in NAMES)


@pytest.mark.parametrize("width", [62, 80])
def test_a_narrow_terminal_gets_the_columns_in_parts_each_with_its_keys(printed, width):
    lines = printed(figures(), width, keys=2)
    assert max(map(cell_len, lines)) <= width
    text = "\n".join(lines)
    assert "…" not in text
    for cell in (*NAMES, "1,234,567", "[1,234,567, 2,345,678]"):
        assert text.count(cell) >= 1
    parts = sum(line.startswith("┏") for line in lines)
    assert parts > 1
    assert text.count("preemptions") == text.count("predicted") == parts
    assert text.count("figures") == text.count("that is all") == 1


def test_a_terminal_narrower_than_one_column_cuts_nothing_either(printed):
    text = "\n".join(printed(figures(), 20))
    assert "…" not in text
    assert all(name in text for name in NAMES)


@pytest.mark.parametrize("width", [60, None])
def test_prose_is_wrapped_and_its_long_words_are_folded(printed, width):
    table = Table("part", prose("finding"), prose("remedy"))
    path = "/a/path" * 40
    table.add_row("core", f"nothing is at {path}; that is a pity", "make it " * 20)
    lines = printed(table, width)
    assert max(map(cell_len, lines)) <= (width or 130)
    assert sum(line.startswith("┏") for line in lines) == 1
    column = "".join(line.split("│")[2].strip() for line in lines if line.startswith("│"))
    assert path in column


@pytest.mark.parametrize("arguments", [("doctor",), ("plugins",), ("sim", "synthetic", "--policy", "verl")])
def test_commands_cut_nothing_on_a_narrow_terminal(seer, monkeypatch, arguments):
    monkeypatch.setattr(tables, "PLAIN_WIDTH", 60)
    result = seer(*arguments)
    assert result.exit_code == 0, result.output
    assert "…" not in result.stdout
