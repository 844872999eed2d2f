"""The listener ends when it is cancelled, also while a message of the worker arrives."""

import asyncio
import socket
from types import SimpleNamespace

import pytest
from seer_worker.client.process_client import Launch, ProcessClient
from seer_worker.process.serving import work
from seer_worker.wire import Called, Channel, Link, Telemetry

from tests.support.patience import PATIENCE_S

LAUNCH = Launch(
    instance="nowhere:Instance",
    settings={},
    environment={},
    launcher=None,
    log_dir=None,
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


@pytest.mark.parametrize("turns", range(5))
def test_a_word_spoken_while_the_engine_stops_does_not_keep_it_from_stopping(turns):
    async def scenario():
        client, worker = ProcessClient("toy-0", LAUNCH), Worker()
        client.worker = worker
        client._listener = asyncio.create_task(client._listen(worker))
        await asyncio.sleep(0)
        worker.word.set_result([Telemetry(0, 0, 0.0)])
        for _ in range(turns):
            await asyncio.sleep(0)
        stopped, _ = await asyncio.wait({asyncio.create_task(client.stop())}, timeout=PATIENCE_S)
        assert stopped
        assert worker.ended

    asyncio.run(scenario())


class BrokenWorker(Worker):
    """Reads from a connection that breaks, as one to a machine that is gone does."""

    def __init__(self, error):
        super().__init__()
        reader = asyncio.StreamReader()
        reader.set_exception(error)
        self.receive = Channel(reader, None).receive


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ConnectionResetError(104, "Connection reset by peer"), "ended"),
        (TimeoutError(110, "Connection timed out"), "ended; its connection broke: Connection timed out"),
        (OSError(113, "No route to host"), "ended; its connection broke: No route to host"),
    ],
    ids=["reset", "timed-out", "no-route"],
)
def test_a_connection_that_breaks_in_any_way_is_a_loss_with_its_reason(error, reason):
    async def scenario():
        client, worker, losses = ProcessClient("toy-0", LAUNCH), BrokenWorker(error), []
        client._sink = SimpleNamespace(lost=lambda instance_id, reason: losses.append(reason))
        client._chunks.add("chunk")
        await client._listen(worker)
        assert worker.ended
        assert losses == [reason]

    asyncio.run(scenario())


@pytest.mark.parametrize("error", [TimeoutError(110, "timed out"), OSError(113, "No route to host")])
def test_a_worker_whose_connection_breaks_ends_quietly(error):
    class Gone:
        def __init__(self, connection):
            self.connection = connection

        def fileno(self):
            return self.connection.fileno()

        def recv(self, size):
            raise error

        def sendall(self, data):
            raise error

    ours, theirs = socket.socketpair()
    with ours, theirs:
        assert work(Gone(theirs)) == 0
        link = Link(Gone(theirs))
        link.send_last("no more")
        with pytest.raises(EOFError, match="the connection to the runtime broke"):
            link.send(Telemetry(0, 0, 0.0))


def test_a_worker_that_answers_what_it_was_not_asked_is_lost_with_the_reason():
    async def scenario():
        client, worker = ProcessClient("toy-0", LAUNCH), Worker()
        losses = asyncio.get_running_loop().create_future()
        client.worker = worker
        client._sink = SimpleNamespace(lost=lambda name, reason: losses.set_result(reason))
        worker.word.set_result([Called()])
        client._listener = asyncio.create_task(client._listen(worker))
        return await asyncio.wait_for(losses, PATIENCE_S)

    reason = asyncio.run(scenario())
    assert reason == "its worker sent no message of Seer's: an answer to no call"
