"""Workers that connect over TCP: both sides prove a key, and an identity is good once."""

import asyncio
import os
import secrets
import socket
import threading

import pytest
from seer_host.ports import reserved_port
from seer_worker.client.worker_port import WorkerPort
from seer_worker.process import remote
from seer_worker.process.remote import connect
from seer_worker.wire import Channel, Link, Shutdown, Telemetry

from tests.support.patience import PATIENCE_S


def play(story):
    async def bounded():
        port = WorkerPort("127.0.0.1")
        await port.open()
        await port.open()
        try:
            await asyncio.wait_for(story(port), PATIENCE_S)
        finally:
            port.close()

    asyncio.run(bounded())


def knock(port, worker):
    return asyncio.to_thread(connect, port.host, port.port, worker.identity, worker.key)


def test_messages_travel_both_ways_once_both_keys_are_proved():
    async def story(port):
        worker = port.expect()
        with await knock(port, worker) as connection:
            channel = Channel(*await worker.streams)
            Link(connection).send(Telemetry(1, 2, 0.5))
            assert await channel.receive() == [Telemetry(1, 2, 0.5)]
            channel.send(Shutdown())
            assert await asyncio.to_thread(Link(connection).receive, wait=True) == [Shutdown()]
            channel.close()

    play(story)


def test_an_identity_is_good_once_and_a_wrong_one_or_a_wrong_key_never():
    async def story(port):
        worker = port.expect()
        for identity, key in (
            (worker.identity, secrets.token_bytes(32)),
            (secrets.token_bytes(32), worker.key),
        ):
            with pytest.raises(ConnectionError, match="it refuses this worker"):
                await asyncio.to_thread(connect, port.host, port.port, identity, key)
        assert not worker.streams.done()
        with await knock(port, worker):
            _, writer = await worker.streams
            with pytest.raises(ConnectionError, match="it refuses this worker"):
                await knock(port, worker)
            writer.close()
        assert port.refused == 3

    play(story)


def test_a_worker_that_is_no_longer_expected_is_refused_or_closed():
    async def story(port):
        late, came = port.expect(), port.expect()
        port.forget(late)
        with pytest.raises(ConnectionError, match="it refuses this worker"):
            await knock(port, late)
        with await knock(port, came) as connection:
            await came.streams
            port.forget(came)
            assert await asyncio.to_thread(connection.recv, 1) == b""

    play(story)


def test_a_runtime_that_does_not_prove_the_key_is_left():
    with socket.create_server(("127.0.0.1", 0)) as server:

        def pretend():
            connection, _ = server.accept()
            with connection:
                connection.sendall(bytes(32))
                connection.recv(96)
                connection.sendall(bytes(32))

        thread = threading.Thread(target=pretend)
        thread.start()
        with pytest.raises(ConnectionError, match="it does not prove this worker's key"):
            connect(*server.getsockname(), bytes(32), bytes(32))
        thread.join()


def test_a_worker_that_reaches_no_runtime_says_where_it_looked(capsys, monkeypatch):
    monkeypatch.setattr(remote, "configure_log", lambda: None)
    monkeypatch.setattr(remote.signal, "signal", lambda *handler: None)
    held, given = os.pipe()
    os.write(given, bytes(64))
    os.close(given)
    with reserved_port() as port:
        assert remote.main("127.0.0.1", port, held) == 1
    assert f"no connection to the runtime at 127.0.0.1, port {port}: " in capsys.readouterr().err


def test_a_port_in_use_is_an_error():
    async def story(port):
        with pytest.raises(OSError, match="in use"):
            WorkerPort(port.host, port.port)

    play(story)
