"""The actor beside a worker, without a cluster."""

import asyncio
import threading

import pytest

pytest.importorskip("ray")
from seer_ray import supervisor

from tests.support.patience import PATIENCE_S


@pytest.fixture
def exits(monkeypatch):
    """Return what the supervisor's process would have ended with."""
    ended, seen = threading.Event(), []

    def leave(status):
        seen.append(status)
        ended.set()

    monkeypatch.setattr(supervisor.os, "_exit", leave)
    return ended, seen


def test_a_supervisor_whose_runtime_has_ended_before_it_started_a_worker_ends_too(exits):
    ended, seen = exits

    async def make():
        supervisor.Supervisor(0.01)

    asyncio.run(make())
    assert ended.wait(PATIENCE_S)
    assert seen == [0]


def test_the_wait_is_over_once_there_is_a_worker(exits, monkeypatch):
    monkeypatch.setattr(supervisor.ray, "get_runtime_context", lambda: Context())
    monkeypatch.setattr(supervisor.ray, "get_gpu_ids", list)

    async def start():
        one = supervisor.Supervisor(3600.0)
        started = await one.start("/bin/true", {}, ("127.0.0.1", 9), bytes(32))
        one._unused.join(PATIENCE_S)  # it is over long before its time
        await one._end
        return started, one._unused.is_alive()

    started, waits = asyncio.run(start())
    assert started["pid"] > 0
    assert not waits
    assert exits[1] == []


class Context:
    def get_node_id(self):
        return "here"
