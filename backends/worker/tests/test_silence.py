"""How long a worker that has chunks may be silent, on a clock that the tests move."""

import asyncio
from pathlib import Path

import attrs
import pytest
from seer_worker.client import process_transport
from seer_worker.client.process_transport import Launch, ProcessTransport
from seer_worker.wire import Submit, Telemetry

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


@attrs.define(eq=False)
class Peer:
    chunks: set = attrs.Factory(set)
    received: list = attrs.Factory(list)
    losses: list = attrs.Factory(list)

    def receive(self, message):
        self.received.append(message)

    def lost(self, reason):
        self.losses.append(reason)


@pytest.fixture
def play(monkeypatch):
    """Return a function that plays a story with a worker and its peer, and returns why the worker is lost."""

    def play(story):
        async def played():
            loop = asyncio.get_running_loop()
            monkeypatch.setattr(process_transport, "monotonic", loop.time)
            transport, worker, peer = ProcessTransport(LAUNCH), Worker(), Peer()
            transport.worker, transport._peer = worker, peer
            transport._listener = asyncio.create_task(transport._listen(worker, peer))
            await asyncio.sleep(0)

            def submit():
                peer.chunks.add("j")
                transport.send(Submit(ChunkJob("j", "j", "g", [1], 1, 9, Sampling(), 5, 0)))

            await story(worker, peer, submit)
            await asyncio.sleep(0)
            await transport.close()
            return peer.losses

        return run_in_virtual_time(played())

    return play


def test_a_worker_that_is_silent_with_a_chunk_is_lost_at_its_limit(play):
    async def story(worker, peer, submit):
        submit()
        await later(0.9 * LIMIT_S)
        assert peer.losses == []
        await later(0.5 * LIMIT_S)

    assert play(story) == LOST


def test_every_byte_ends_the_silence(play):
    async def story(worker, peer, submit):
        submit()
        for _ in range(10):
            await later(0.9 * LIMIT_S)
            worker.report()
            await later(0.6 * LIMIT_S)
            worker.received_bytes += 1  # of a message that has not come to its end
        assert len(peer.received) == 10

    assert play(story) == []


@pytest.mark.parametrize("seconds", [1.2 * LIMIT_S, 10 * LIMIT_S])
def test_an_instance_outlives_an_event_loop_that_does_not_listen(play, seconds):
    async def story(worker, peer, submit):
        submit()
        for _ in range(3):
            await asyncio.sleep(0)
            asyncio.get_running_loop().pass_s(seconds)  # a reward that computes, say
        await later(0.5 * LIMIT_S)
        worker.report()
        await asyncio.sleep(0)

    assert play(story) == []


def test_a_worker_that_is_silent_after_the_event_loop_has_come_back_is_lost(play):
    async def story(worker, peer, submit):
        submit()
        asyncio.get_running_loop().pass_s(10 * LIMIT_S)
        await later(1.5 * LIMIT_S)

    assert play(story) == LOST


def test_idle_time_is_no_silence(play):
    async def story(worker, peer, submit):
        await later(0.9 * LIMIT_S)
        submit()
        await later(0.9 * LIMIT_S)
        worker.report()
        await asyncio.sleep(0)
        peer.chunks.clear()
        await later(10 * LIMIT_S)

    assert play(story) == []
