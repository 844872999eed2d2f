"""Lending the engines to a client who goes at any moment while he waits for them."""

import asyncio
from types import SimpleNamespace

import pytest
from seer_server.control import Control
from seer_server.desk import Desk
from seer_server.http import Refused


class Open:
    """A rollout with an unfinished response."""

    transcripts = (1,)

    def close(self):
        """Do nothing."""


class Request:
    """Of a client who has gone once it is told so."""

    def __init__(self):
        self.gone = asyncio.Event()

    async def receive(self):
        await self.gone.wait()
        return {"type": "http.disconnect"}


async def story(ticks, quiet_first):
    """Let the rollout end so many turns of the event loop before or after the client goes."""
    runtime = SimpleNamespace(
        fleet=SimpleNamespace(asleep=False, expect_living=lambda: None), open=lambda **_: Open()
    )
    desk = Desk(lambda observers: runtime)
    desk._rollout = rollout = Open()
    request = Request()

    async def update():
        async with Control(desk, None)._idle(request, 60.0):
            pass

    def end():
        rollout.transcripts = ()
        if desk._quiet is not None:
            desk._quiet.set()

    updating = asyncio.create_task(update())
    while desk._quiet is None:
        await asyncio.sleep(0)
    first, second = (end, request.gone.set) if quiet_first else (request.gone.set, end)
    first()
    for _ in range(ticks):
        await asyncio.sleep(0)
    second()
    await asyncio.wait({updating})
    assert updating.exception() is None or isinstance(updating.exception(), Refused)
    assert desk._rollout is not None
    assert not desk._lending.locked()


@pytest.mark.parametrize("quiet_first", [True, False])
@pytest.mark.parametrize("ticks", range(6))
def test_whenever_a_waiting_client_goes_the_engines_are_lent_to_nobody(ticks, quiet_first):
    asyncio.run(asyncio.wait_for(story(ticks, quiet_first), 60))
