"""The listener ends when it is told to, whatever the worker says at that moment."""

import asyncio

import pytest
from seer_host.engine import Launch, WorkerEngine
from seer_host.wire import Telemetry

LAUNCH = Launch("nowhere:Instance", {}, {}, None, 0.2, 5.0, 5.0, 5.0, 300.0)


class Worker:
    """Says one thing, when told to, and then nothing more."""

    received_bytes = 0
    log = "nowhere"

    def __init__(self):
        self.word = asyncio.get_running_loop().create_future()
        self.ended = False

    async def receive(self):
        if self.word is None:
            await asyncio.get_running_loop().create_future()
        messages = await self.word
        self.word = None
        return messages

    async def end(self, grace_s=0.0):
        self.ended = True
        return "ended"

    def discard_log(self):
        pass


class Sink:
    def reported(self, report):
        pass


@pytest.mark.parametrize("turns", range(5))
def test_a_word_spoken_while_the_engine_stops_does_not_keep_it_from_stopping(turns):
    async def scenario():
        engine, worker = WorkerEngine("i", LAUNCH), Worker()
        engine._worker = worker
        engine._listener = asyncio.create_task(engine._listen(worker, Sink()))
        await asyncio.sleep(0)
        worker.word.set_result([Telemetry(0, 0, 0.0)])
        for _ in range(turns):
            await asyncio.sleep(0)
        stopped, _ = await asyncio.wait({asyncio.create_task(engine.stop())}, timeout=5)
        assert stopped
        assert worker.ended

    asyncio.run(scenario())
