"""Exclusive use of the engines, for a client that disconnects at any moment while it waits for them."""

import asyncio
from types import SimpleNamespace

import pytest
from seer_server.broker import RolloutBroker
from seer_server.control import Control
from seer_server.http import Refused

from tests.support.patience import PATIENCE_S


class Open:
    """A rollout with an unfinished response."""

    unfinished = (1,)

    def close(self):
        """Do nothing."""


class Request:
    """A request whose client disconnects when ``gone`` is set."""

    def __init__(self):
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def story(ticks, quiet_first):
    """Let the rollout end so many turns of the event loop before or after the client goes."""
    runtime = SimpleNamespace(asleep=False, require_alive=lambda: None, open=lambda **_: Open())
    broker = RolloutBroker(lambda observers: runtime)
    broker._rollout = rollout = Open()
    request = Request()

    async def update():
        async with Control(broker)._exclusive(request, 60.0):
            pass

    def end():
        rollout.unfinished = ()
        if broker._drained is not None:
            broker._drained.set()

    updating = asyncio.create_task(update())
    while broker._drained is None:
        await asyncio.sleep(0)
    first, second = (end, request.gone.set) if quiet_first else (request.gone.set, end)
    first()
    for _ in range(ticks):
        await asyncio.sleep(0)
    second()
    await asyncio.wait({updating})
    assert updating.exception() is None or isinstance(updating.exception(), Refused)
    assert broker._rollout is not None
    assert not broker._lock.locked()


@pytest.mark.parametrize("quiet_first", [True, False])
@pytest.mark.parametrize("ticks", range(6))
def test_whenever_a_waiting_client_goes_the_engines_are_released(ticks, quiet_first):
    asyncio.run(asyncio.wait_for(story(ticks, quiet_first), PATIENCE_S))
