"""The port of a launcher, without a cluster."""

import asyncio

import pytest

pytest.importorskip("ray")

from seer_ray.launcher import RayLauncher
from seer_ray.settings import Settings
from seer_worker.client.worker_port import WorkerPort


def test_a_launch_that_ends_while_the_port_opens_leaves_nothing(monkeypatch):
    async def refuse(port):
        raise asyncio.CancelledError

    async def story():
        launcher = RayLauncher(Settings())
        with pytest.raises(asyncio.CancelledError):
            await launcher._listen("127.0.0.1")
        return launcher

    monkeypatch.setattr(WorkerPort, "open", refuse)
    launcher = asyncio.run(story())
    assert (launcher._users, launcher._port, launcher._watch) == (0, None, None)
