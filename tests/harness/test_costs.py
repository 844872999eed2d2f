"""Each process records what its tests cost, and a script prints one table of it."""

import json

import pytest

CLIENT = """
class ProcessClient:
    async def _open(self, start):
        return "ready"
"""
SERVER = """
class ForkServer:
    def __init__(self, interpreter, preload, environment):
        self.preload = preload
"""
TEST = """
import asyncio

def test_starts_two():
    from seer_worker.client.fork_server import ForkServer  # at first here
    from seer_worker.client.process_client import ProcessClient

    assert ForkServer("python", "engine:preload", {}).preload == "engine:preload"
    client = ProcessClient()
    assert asyncio.run(client._open(None)) == asyncio.run(client._open(None)) == "ready"

def test_starts_none():
    pass
"""


@pytest.fixture
def client(tmp_path):
    """A package of the client's and the fork server's names, which starts nothing."""
    package = tmp_path / "seer_worker" / "client"
    package.mkdir(parents=True)
    (package / "process_client.py").write_text(CLIENT)
    (package / "fork_server.py").write_text(SERVER)


@pytest.mark.usefixtures("client")
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
    assert all(each["seconds"] > 0 and each["processor_seconds"] >= 0 for each in costs.values())
    two, none = costs["test_it.py::test_starts_two"], costs["test_it.py::test_starts_none"]
    assert (two["engines"], two["imports"]) == (2, 1)
    assert not {"engines", "imports"} & none.keys()
