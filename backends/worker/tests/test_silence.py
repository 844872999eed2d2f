"""How long a worker that has chunks may be silent, on a clock that the tests move."""

import asyncio
from pathlib import Path

import attrs
import pytest
from seer_worker.client import process_client
from seer_worker.client.process_client import Launch, ProcessClient
from seer_worker.wire import Telemetry

from seer_core.model import Sampling
from seer_core.ports.engine import ChunkJob
from tests.support.virtual_time import later, run_in_virtual_time

LIMIT_S = 3.0
LOST = ["silent for silence_timeout_s = 3 with 1 chunks"]
LAUNCH = Launch(
    instance="nowhere:Instance",
    settings={},
    environment={},
    launcher=None,
    log_dir=Path(),
    start_timeout_s=60.0,
    stop_timeout_s=60.0,
    control_timeout_s=60.0,
    silence_timeout_s=LIMIT_S,
)


@attrs.define(eq=False)
class Worker:
    """Reports when the test has it do so, and takes all that it is sent."""

    words: asyncio.Queue = attrs.Factory(asyncio.Queue)
    received_bytes: int = 0
    sent: list = attrs.Factory(list)
    log: str = "nowhere"

    async def receive(self):
        return await self.words.get()

    def report(self):
        self.received_bytes += 1
        self.words.put_nowait([Telemetry(1, 0, 0.0)])

    def send(self, *messages):
        self.sent += messages

    async def end(self, grace_s=0.0):
        return "ended"

    def discard_log(self):
        pass


class Client(ProcessClient):
    """Writes down what comes."""

    def __init__(self):
        super().__init__("toy-0", LAUNCH)
        self.received, self.losses = [], []
        self._up = True

    def _receive(self, message):
        self.received.append(message)

    def _lost(self, reason):
        self.losses.append(reason)


@pytest.fixture
def play(monkeypatch):
    """Return a function that plays a story with a worker and its client, and returns its losses."""

    def play(story):
        async def played():
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(process_client, "monotonic", loop.time)
            client, worker = Client(), Worker()
            client.worker = worker
            client._listener = asyncio.create_task(client._listen(worker))
            await asyncio.sleep(0)

            def submit():
                client.submit(ChunkJob("j", "j", "g", [1], 1, 9, Sampling(), 5, 0))

            await story(worker, client, submit)
            await asyncio.sleep(0)
            await client.stop()
            return client.losses

        return run_in_virtual_time(played())

    return play


def test_a_worker_that_is_silent_with_a_chunk_is_lost_at_its_limit(play):
    async def story(worker, client, submit):
        submit()
        await later(0.9 * LIMIT_S)
        assert client.losses == []
        await later(0.5 * LIMIT_S)

    assert play(story) == LOST


def test_every_byte_ends_the_silence(play):
    async def story(worker, client, submit):
        submit()
        for _ in range(10):
            await later(0.9 * LIMIT_S)
            worker.report()
            await later(0.6 * LIMIT_S)
            worker.received_bytes += 1  # of a message that has not come to its end
        assert len(client.received) == 10

    assert play(story) == []


@pytest.mark.parametrize("seconds", [1.2 * LIMIT_S, 10 * LIMIT_S])
def test_an_instance_outlives_an_event_loop_that_does_not_listen(play, seconds):
    async def story(worker, client, submit):
        submit()
        for _ in range(3):
            await asyncio.sleep(0)
            asyncio.get_running_loop().pass_s(seconds)  # a reward that computes, say
        await later(0.5 * LIMIT_S)
        worker.report()
        await asyncio.sleep(0)

    assert play(story) == []


def test_a_worker_that_is_silent_after_the_event_loop_has_come_back_is_lost(play):
    async def story(worker, client, submit):
        submit()
        asyncio.get_running_loop().pass_s(10 * LIMIT_S)
        await later(1.5 * LIMIT_S)

    assert play(story) == LOST


def test_idle_time_is_no_silence(play):
    async def story(worker, client, submit):
        await later(0.9 * LIMIT_S)
        submit()
        await later(0.9 * LIMIT_S)
        worker.report()
        await asyncio.sleep(0)
        client._chunks.clear()
        await later(10 * LIMIT_S)

    assert play(story) == []
