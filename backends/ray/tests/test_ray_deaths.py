"""`seer run` on a cluster whose head dies, or which dies itself; each run goes on by --resume."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import tempfile

import psutil
import pytest

pytest.importorskip("ray")

from machines import RECONNECT, RECONNECT_S, SUPERVISOR, WORKER
from ray_rollouts import LIMIT_S, START_S
from scripted_plugin import install

from tests.support.eventually import eventually

MARK = "SEER_TEST_MARK"
CONFIG = """
[seer]
engine = "scripted"
plugins = ["divided_rollout", "scripted"]
launcher = "{launcher}"

{table}

[engine.scripted]
step_s = {step_s}
"""
TABLE = """
[launcher.ray]
address = "{}"
launch_timeout_s = {}
"""


class Runs:
    """Runs of one prompts file, each of which has its output in a directory."""

    def __init__(self, start_seer, tmp_path):
        self._start, self._path = start_seer, tmp_path
        self._prompts = tmp_path / "prompts.jsonl"
        lines = [
            {
                "group_id": f"p{n}",
                "prompt_token_ids": [5 + n, 7],
                "n": 4,
                "max_tokens": 150 + 50 * n,
                "seed": n,
            }
            for n in range(6)
        ]
        self._prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))

    def start(self, out, nodes=None, *, step_s=0.02, resume=False):
        address = "" if nodes is None else TABLE.format(nodes.address, START_S)
        config = self._path / f"{out}.toml"
        launcher = "local" if nodes is None else "ray"
        config.write_text(CONFIG.format(launcher=launcher, table=address, step_s=step_s))
        more = ["--resume"] if resume else []
        return self._start("run", config, "--prompts", self._prompts, "--out", self._path / out, *more)

    def tokens(self, out):
        lines = (self._path / out / "completions.jsonl").read_text().splitlines()
        return {each["request_id"]: each["token_ids"] for each in map(json.loads, lines)}

    def summary(self, out):
        return json.loads((self._path / out / "summary.json").read_text())

    def wait_for_tokens(self, process, out, responses=2):
        """Wait until so many responses have finished."""
        eventually(lambda: process.poll() is None and self._written(out) >= responses)

    def _written(self, out):
        path = self._path / out / "completions.jsonl"
        return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.fixture
def runs(start_seer, tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", install(tmp_path / "site"))
    return Runs(start_seer, tmp_path)


@pytest.fixture
def expected(runs):
    process = runs.start("here", step_s=0.0)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    return runs.tokens("here")


@pytest.fixture
def make_nodes(monkeypatch):
    """Return a function that makes a cluster of two nodes, which this process does not join."""
    from raylets import Nodes

    directory = tempfile.mkdtemp(prefix="ray-")
    monkeypatch.setenv("RAY_TMPDIR", directory)
    monkeypatch.setenv(MARK, secrets.token_hex(8))
    monkeypatch.setenv(RECONNECT, str(RECONNECT_S))
    made = []

    def make():
        nodes = Nodes(directory)
        made.append(nodes)
        for _ in range(2):
            nodes.add()
        return nodes

    yield make
    for nodes in made:
        nodes.cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


def started_there():
    """Return the workers and supervisors of this test's clusters."""
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            line = " ".join(process.cmdline())
            if (WORKER in line or SUPERVISOR in line) and (process.environ().get(MARK) == os.environ[MARK]):
                found.append(process)
    return found


def kill_head(nodes):
    from ray._private import ray_constants

    head = nodes.cluster.head_node.all_processes[ray_constants.PROCESS_TYPE_GCS_SERVER][0].process
    head.kill()
    head.wait()


def test_a_rollout_goes_on_to_its_end_without_the_cluster_s_head(make_nodes, runs, expected):
    nodes = make_nodes()
    process = runs.start("there", nodes)
    runs.wait_for_tokens(process, "there")
    kill_head(nodes)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert runs.tokens("there") == expected
    assert runs.summary("there")["instances_lost"] == 0


@pytest.mark.long
def test_a_run_without_head_and_instances_ends_in_order_and_goes_on_with_another_cluster(
    make_nodes, runs, expected
):
    nodes = make_nodes()
    process = runs.start("there", nodes)
    runs.wait_for_tokens(process, "there")
    kill_head(nodes)
    for each in started_there():
        if WORKER in " ".join(each.cmdline()):
            each.kill()
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 1, errors
    assert f"the head of the Ray cluster at {nodes.address} has not answered for" in errors
    assert "the same command with --resume" in errors
    assert runs.summary("there")["ended"] == "failed"
    assert 0 < len(runs.tokens("there")) < len(expected)
    eventually(lambda: not started_there())  # without a head Ray ends no actor
    process = runs.start("there", make_nodes(), resume=True, step_s=0.0)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert runs.tokens("there") == expected
    assert runs.summary("there")["resumed_tokens"] > 0


def test_a_run_that_is_ended_leaves_nothing_on_the_cluster_and_goes_on_there(make_nodes, runs, expected):
    nodes = make_nodes()
    written = 0
    for number, status in ((signal.SIGTERM, 143), (signal.SIGKILL, -9)):
        process = runs.start("there", nodes, resume=written > 0)
        runs.wait_for_tokens(process, "there", written + 2)
        assert len(started_there()) == 4
        process.send_signal(number)
        _, errors = process.communicate(timeout=LIMIT_S)
        assert process.returncode == status, errors
        eventually(lambda: not started_there())
        written = len(runs.tokens("there"))
        assert written < len(expected)
    process = runs.start("there", nodes, resume=True, step_s=0.0)
    _, errors = process.communicate(timeout=LIMIT_S)
    assert process.returncode == 0, errors
    assert runs.tokens("there") == expected
    eventually(lambda: not started_there())
