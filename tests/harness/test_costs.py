"""Each process records what its tests cost, and a script prints one table of it."""

import importlib.machinery
import importlib.util
import json
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "test-costs"
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


@pytest.fixture
def script(tmp_path, monkeypatch):
    """The script, on records and a table below ``tmp_path``."""
    loader = importlib.machinery.SourceFileLoader("test_costs_script", str(SCRIPT))
    module = importlib.util.module_from_spec(importlib.util.spec_from_loader("test_costs_script", loader))
    loader.exec_module(module)
    for name, path in (("ROOT", "."), ("RECORDS", "records"), ("STORED", "seconds.toml")):
        monkeypatch.setattr(module, name, tmp_path / path)
    module.RECORDS.mkdir()
    return module


def test_the_table_of_long_files_is_of_the_last_whole_gate_and_keeps_other_files(script, tmp_path):
    def record(name, **seconds):
        lines = [
            json.dumps({"test": f"tests/{file}.py::test_it", "seconds": each})
            for file, each in seconds.items()
        ]
        (script.RECORDS / f"{name}.jsonl").write_text("\n".join(lines))

    (tmp_path / "tests").mkdir()
    for name in ("a", "b", "of_the_rest", "short"):
        (tmp_path / "tests" / f"{name}.py").touch()
    before = {"of_the_rest": 70, "a": 3, "gone": 9, "short": 8}
    script.STORED.write_text("".join(f'"tests/{name}.py" = {each}\n' for name, each in before.items()))
    assert script.main(["--store"]) == 1
    record("100-1-gate-5", a=30.0, b=40.0)
    record("200-1-gate-9", a=10.2)
    record("200-2-gate-9", b=20.0, short=1.0)
    record("300-1", a=99.0)  # of a run of one file
    assert script.main(["--store"]) == 0
    lines = script.STORED.read_text().splitlines()
    assert [line for line in lines if line and line[0] != "#"] == [
        '"tests/of_the_rest.py" = 70',
        '"tests/b.py" = 20',
        '"tests/a.py" = 10',
    ]


def test_a_whole_run_of_the_gate_has_one_name_in_all_its_processes(run_tests, tmp_path):
    settings = "[pytest]\nfilterwarnings = error\ntestpaths = .\n"
    option = "def pytest_addoption(parser):\n    parser.addoption('--gate', action='store_true')\n"
    (tmp_path / "pytest.ini").write_text(settings)
    tests = {"test_a": "def test_a(): pass", "test_b": "def test_b(): pass", "conftest": option}
    run_tests(["costs"], "-p", "xdist", "-n", "2", "--gate", **tests)
    run_tests(["costs"], "-p", "xdist", "-n", "2", "--gate", "test_a.py", **tests)
    runs = [path.stem.partition("-gate-")[2] for path in (tmp_path / "build/test-costs").glob("*.jsonl")]
    assert len(runs) in (2, 3)  # both tests may have gone to one process
    assert len({*runs} - {""}) == 1
