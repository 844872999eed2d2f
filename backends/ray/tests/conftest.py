"""Ray clusters, of raylets on this machine and of machines of their own, and runtimes on them."""

import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest
from seer_worker.client.local import LocalLauncher

sys.path.insert(0, str(Path(__file__).parent))

from machines import Machines, allowed  # which sets what Ray reads when it is imported
from raylets import Nodes

SIZE = 3
"""The nodes that each module of tests finds in a cluster."""


@pytest.fixture(scope="session")
def _raylets():
    pytest.importorskip("ray")
    directory = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are bounded
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_TMPDIR", directory)
        nodes = Nodes(directory)
    yield nodes
    nodes.cluster.shutdown()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def nodes(_raylets, monkeypatch_module):
    """A cluster of three nodes, which this process may join."""
    import ray

    monkeypatch_module.setenv("RAY_TMPDIR", _raylets.directory)
    while len(_raylets.nodes) < SIZE:
        _raylets.add()
    yield _raylets
    ray.shutdown()


@pytest.fixture(scope="session")
def _machines():
    pytest.importorskip("ray")
    if not allowed():
        pytest.skip("machines are made of namespaces, for which root and iproute2 are needed")
    machines = Machines()
    yield machines
    machines.close()


@pytest.fixture(scope="module")
def machines(_machines, monkeypatch_module):
    """A cluster of three machines with networks of their own, which this process may join."""
    import ray

    monkeypatch_module.setenv("RAY_TMPDIR", _machines.directory)
    for dead in [each for each in _machines.machines if not each.up]:
        _machines.remove(dead)
    for machine in [_machines.add(wait=False) for _ in range(SIZE - len(_machines.machines))]:
        _machines.wait_for(machine)
    yield _machines
    ray.shutdown()


@pytest.fixture(scope="module")
def monkeypatch_module():
    with pytest.MonkeyPatch.context() as patch:
        yield patch


@pytest.fixture
def make_runtime(tmp_path):
    """Return a function that makes a runtime of two instances over a launcher."""
    from ray_rollouts import scripted_runtime

    return partial(scripted_runtime, tmp_path / "logs")


@pytest.fixture
def make_weighted(make_runtime):
    """Return the same for an engine whose tokens follow from its weights."""
    return partial(make_runtime, instance="weighted:Weighted")


@pytest.fixture
def expected(make_runtime):
    """Return the tokens that child processes write in a rollout of ``some_groups``."""
    from ray_rollouts import play, some_groups, tokens

    async def here():
        async with make_runtime(LocalLauncher()) as runtime:
            return tokens(await runtime.rollout(some_groups()).wait())

    return play(here())
