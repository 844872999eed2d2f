"""Ray clusters, of raylets on this machine and of machines of their own, and runtimes on them."""

import os
import shutil
import sys
import tempfile
from functools import partial
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from machines import Machines, allowed  # which sets what Ray reads when it is imported
from raylets import Nodes


@pytest.fixture(scope="module")
def nodes():
    """A cluster of three nodes, which this process has joined."""
    ray = pytest.importorskip("ray")
    directory = tempfile.mkdtemp(prefix="ray-")  # short: the paths of sockets are bounded
    before = dict(os.environ)
    os.environ["RAY_TMPDIR"] = directory
    nodes = Nodes(directory)
    try:
        for _ in range(3):
            nodes.add()
        yield nodes
    finally:
        ray.shutdown()
        nodes.cluster.shutdown()
        os.environ.clear()
        os.environ.update(before)
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(scope="module")
def machines():
    """A cluster of three machines with networks of their own, which this process may join."""
    ray = pytest.importorskip("ray")
    if not allowed():
        pytest.skip("machines are made of namespaces, for which root and iproute2 are needed")
    machines = Machines()
    try:
        for machine in [machines.add(wait=False) for _ in range(3)]:
            machines.wait_for(machine)
        yield machines
    finally:
        ray.shutdown()
        machines.close()


@pytest.fixture
def make_runtime(tmp_path):
    """Return a function that makes a runtime of two instances over a launcher."""
    from ray_rollouts import scripted_runtime

    return partial(scripted_runtime, tmp_path / "logs")


@pytest.fixture
def make_weighted(make_runtime):
    """Return the same for an engine whose tokens follow from its weights."""
    return partial(make_runtime, instance="weighted:Weighted")
