"""Each process records what its tests cost, and a script prints one table of it."""

import json

import pytest

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
