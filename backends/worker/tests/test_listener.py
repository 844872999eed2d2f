"""The listener ends when it is cancelled, also while a message of the worker arrives."""

import asyncio

import pytest
from seer_worker.client.process_transport import Launch, ProcessTransport
from seer_worker.wire import Telemetry

LAUNCH = Launch(
    instance="nowhere:Instance",
    settings={},
    environment={},
    launcher=None,
    start_timeout_s=0.2,
    stop_timeout_s=5.0,
    control_timeout_s=5.0,
    silence_timeout_s=5.0,
)


class Worker:
    """Sends one message, when the test sets it, and then nothing more."""

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


class Peer:
    chunks = frozenset()

    def receive(self, message):
        pass


@pytest.mark.parametrize("turns", range(5))
def test_a_word_spoken_while_the_engine_stops_does_not_keep_it_from_stopping(turns):
    async def scenario():
        transport, worker = ProcessTransport(LAUNCH), Worker()
        transport.worker = worker
        transport._listener = asyncio.create_task(transport._listen(worker, Peer()))
        await asyncio.sleep(0)
        worker.word.set_result([Telemetry(0, 0, 0.0)])
        for _ in range(turns):
            await asyncio.sleep(0)
        stopped, _ = await asyncio.wait({asyncio.create_task(transport.close())}, timeout=5)
        assert stopped
        assert worker.ended

    asyncio.run(scenario())
