"""Each process records what its tests cost, and a script prints one table of it."""

import json
import runpy
from pathlib import Path

import pytest

SCRIPT = str(Path(__file__).parents[2] / "scripts" / "test-costs")
TRANSPORT = """
class ProcessTransport:
    async def open(self, start, peer):
        return "ready"
"""
TEST = """
import asyncio

def test_starts_two():
    from seer_worker.client.process_transport import ProcessTransport  # at first here

    transport = ProcessTransport()
    assert asyncio.run(transport.open(None, None)) == asyncio.run(transport.open(None, None)) == "ready"

def test_starts_none():
    pass
"""


@pytest.fixture
def transport(tmp_path):
    """A package of the transport's name, which starts nothing."""
    package = tmp_path / "seer_worker" / "client"
    package.mkdir(parents=True)
    (package / "process_transport.py").write_text(TRANSPORT)


@pytest.mark.usefixtures("transport")
@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["here", "in workers"])
def test_each_test_has_its_seconds_and_the_engines_that_it_has_started(run_tests, tmp_path, workers):
    assert (
        run_tests(["costs"], *workers, test_it=TEST, conftest="import sys\nsys.path.insert(0, '')\n").status
        == 0
    )
    lines = [
        json.loads(line)
        for path in (tmp_path / "build" / "test-costs").glob("*.jsonl")
        for line in path.read_text().splitlines()
    ]
    costs = {each.pop("test"): each for each in lines}
    assert set(costs) == {"test_it.py::test_starts_two", "test_it.py::test_starts_none"}
    assert all(each["seconds"] > 0 for each in costs.values())
    assert costs["test_it.py::test_starts_two"]["engines"] == 2
    assert "engines" not in costs["test_it.py::test_starts_none"]


@pytest.fixture
def table(tmp_path, capsys):
    """Return a function that prints the table of these records: each process's, the oldest first."""

    def table(*processes, arguments=()):
        names = runpy.run_path(SCRIPT)
        main = names["main"]
        main.__globals__["RECORDS"] = tmp_path
        for number, records in enumerate(processes):
            lines = "".join(json.dumps(record) + "\n" for record in records)
            (tmp_path / f"{number}-1.jsonl").write_text(lines)
        status = main(list(arguments))
        return status, capsys.readouterr().out

    return table


def test_the_table_adds_up_the_newest_records_of_each_file_and_part(table):
    here, other = "tests/harness/test_costs.py", "tests/harness/test_order.py"
    status, printed = table(
        [{"test": f"{here}::a", "seconds": 100.0}, {"test": "tests/harness/test_gone.py::a", "seconds": 9.0}],
        [
            {"test": f"{here}::a", "seconds": 1.0},
            {"test": f"{here}::b", "seconds": 2.5, "engines": 2, "engine_seconds": 1.5},
            {"test": f"{other}::a", "seconds": 7.0},
        ],
    )
    assert status == 0
    assert [line.split() for line in printed.splitlines()] == [
        ["seconds", "engine", "starts", "their", "seconds", "tests", "file"],
        ["7.0", "1", other],
        ["3.5", "2", "1.5", "2", here],
        [],
        ["seconds", "engine", "starts", "their", "seconds", "tests", "part"],
        ["10.5", "2", "1.5", "3", "tests/harness"],
        ["10.5", "2", "1.5", "3", "all"],
    ]


def test_without_records_the_table_says_what_to_run(table):
    status, printed = table()
    assert (status, printed) == (1, "")
    assert table([{"test": "tests/harness/test_costs.py::a", "seconds": 1.0}])[0] == 0
    assert table(arguments=["--forget"])[0] == 0
    assert table()[0] == 1
