"""The token goes to a server of the same user alone, on whichever address it is reached."""

import asyncio
import os
import socket
import subprocess
import sys
import threading
from contextlib import ExitStack, contextmanager, suppress

import pytest
from seer_client import AsyncClient, Client, ClientError, listeners
from seer_client.calls import token_of
from seer_host.ports import reserved_port

from tests.support.eventually import PATIENCE_S, eventually

OTHER_USER = 65534
TOKEN = "a-token-of-this-user"


@pytest.fixture
def token_file(tmp_path, monkeypatch):
    """Return a function that writes the token of a port, as a server of this user does."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))

    def write(port, token=TOKEN):
        (tmp_path / "seer").mkdir(mode=0o700, exist_ok=True)
        (tmp_path / "seer" / f"{port}.token").write_text(f"{token}\n")

    return write


@contextmanager
def foreign_program(family, address, port=0):
    """Listen, and keep all bytes that come."""
    with ExitStack() as stack:
        listening = stack.enter_context(socket.socket(family))
        if family == socket.AF_INET6:
            listening.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        listening.bind((address, port))
        listening.listen()
        got = []

        def accept():
            with suppress(OSError):  # it is shut down
                while True:
                    connection, _ = listening.accept()
                    with connection:
                        got.append(connection.recv(1 << 16))

        thread = threading.Thread(target=accept, daemon=True)
        thread.start()
        yield listening.getsockname()[1], got
        listening.shutdown(socket.SHUT_RDWR)
        thread.join(PATIENCE_S)


@pytest.fixture(params=["sync", "async"])
def ask(request):
    """Return a function that asks a server for its state."""

    def plain(url):
        with Client(url, patience_s=0.0, silence_s=5.0) as client:
            return client.state()

    def awaited(url):
        async def run():
            async with AsyncClient(url, patience_s=0.0, silence_s=5.0) as client:
                return await client.state()

        return asyncio.run(asyncio.wait_for(run(), PATIENCE_S))

    return plain if request.param == "sync" else awaited


def as_another(monkeypatch, *ports):
    """Have what listens on ports be another user's, in the eyes of the client."""
    read = listeners._listeners

    def changed(port):
        for address, user in read(port):
            yield address, OTHER_USER if port in ports else user

    monkeypatch.setattr(listeners, "_listeners", changed)


@pytest.mark.parametrize(
    ("family", "address"),
    [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::1")],
)
def test_another_user_s_program_is_sent_nothing(ask, token_file, monkeypatch, family, address):
    with foreign_program(family, address) as (port, got):
        token_file(port)
        as_another(monkeypatch, port)
        url = f"http://[::1]:{port}" if family == socket.AF_INET6 else f"http://127.0.0.1:{port}"
        with pytest.raises(ClientError, match=f"held by user {OTHER_USER}.*was not sent"):
            ask(url)
    assert b"".join(got) == b""


def test_a_program_that_takes_the_port_before_the_connection_is_sent_nothing(ask, token_file, monkeypatch):
    with foreign_program(socket.AF_INET, "127.0.0.1") as (port, got):
        token_file(port)
        monkeypatch.setattr("seer_client.calls.require_one", lambda _: None)  # it has just taken it
        as_another(monkeypatch, port)
        with pytest.raises(ClientError, match=f"held by user {OTHER_USER}"):
            ask(f"http://127.0.0.1:{port}")
    assert b"".join(got) == b""


LISTENER = f"""
import os, socket, sys
if os.geteuid() == 0:
    os.setgid({OTHER_USER})
    os.setuid({OTHER_USER})
with socket.create_server(("127.0.0.1", 0)) as listening:
    print(listening.getsockname()[1], flush=True)
    connection, _ = listening.accept()
    sys.exit(1 if connection.recv(1 << 16) else 0)
"""


def test_a_real_process_of_another_user_is_sent_nothing(ask, token_file, monkeypatch):
    with subprocess.Popen([sys.executable, "-c", LISTENER], stdout=subprocess.PIPE, text=True) as process:
        port = int(process.stdout.readline())
        token_file(port)
        monkeypatch.setattr("seer_client.calls.require_one", lambda _: None)
        if os.geteuid() != 0:  # where it cannot be another user, this process seems to be one
            monkeypatch.setattr("seer_client.calls.token_of", lambda _: TOKEN)
            monkeypatch.setattr("os.getuid", lambda: OTHER_USER)
        with pytest.raises(ClientError, match=r"held by user .*was not sent"):
            ask(f"http://127.0.0.1:{port}")
        assert process.wait(PATIENCE_S) == 0


@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
def test_a_server_of_this_user_gets_the_token_and_a_given_token_is_sent_anywhere(
    serve, token_file, monkeypatch, ask, host
):
    with serve(token=TOKEN) as served:
        port = int(served.url.rpartition(":")[2])
        token_file(port)
        assert ask(f"http://{host}:{port}").instances == ["sim-0", "sim-1"]
        as_another(monkeypatch, port)
        with Client(f"http://{host}:{port}", token=TOKEN, patience_s=0.0) as client:
            assert client.state().instances == ["sim-0", "sim-1"]


def test_a_program_at_a_wider_address_does_not_keep_the_client_from_its_server(
    serve, token_file, monkeypatch, ask
):
    with serve(token=TOKEN) as served:
        port = int(served.url.rpartition(":")[2])
        token_file(port)
        read = listeners._listeners
        wider = [(listeners._address("0" * 32), OTHER_USER)]
        monkeypatch.setattr(listeners, "_listeners", lambda port: [*wider, *read(port)])
        assert ask(served.url).weight_version == 0


def test_a_machine_that_shows_no_listeners_asks_for_a_token(ask, token_file, monkeypatch, tmp_path):
    with foreign_program(socket.AF_INET, "127.0.0.1") as (port, got):
        token_file(port)
        monkeypatch.setattr(listeners, "TABLES", (tmp_path / "absent", tmp_path / "absent6"))
        with pytest.raises(ClientError, match="give the client the token yourself"):
            ask(f"http://127.0.0.1:{port}")
    assert b"".join(got) == b""


def test_a_server_that_was_started_again_with_a_new_token_is_asked_with_that(serve, token_file, monkeypatch):
    with serve(token=TOKEN) as served:
        port = int(served.url.rpartition(":")[2])
        token_file(port, "the-token-of-before")
        with Client(served.url, patience_s=PATIENCE_S) as client:
            with pytest.raises(ClientError, match="bring the server's token"):
                client.state()
            token_file(port)
            assert client.state().weight_version == 0
            # The file changes between reading it and the server's answer.
            tokens = iter(["the-token-of-before"])
            monkeypatch.setattr("seer_client.calls.token_of", lambda url: next(tokens, None) or token_of(url))
            assert client.state().weight_version == 0


def test_nothing_that_listens_is_a_server_that_cannot_be_reached(ask, token_file):
    with reserved_port() as port:  # bound, and nothing listens
        token_file(port)
        with pytest.raises(ClientError, match="no server can be reached"):
            ask(f"http://127.0.0.1:{port}")


def listening(sock, version):
    """Return who listens on a socket's port by this version of IP; by the other another program may."""
    found = listeners._listeners(sock.getsockname()[1])
    return [(str(where), user) for where, user in found if where.version == version]


def test_addresses_are_read_as_linux_writes_them():
    with socket.create_server(("127.0.0.1", 0)) as four:
        assert listening(four, 4) == [("127.0.0.1", os.getuid())]
    with socket.socket(socket.AF_INET6) as six:
        six.bind(("::1", 0))
        six.listen()
        assert eventually(lambda: listening(six, 6)) == [("::1", os.getuid())]
    assert str(listeners._address("0000000000000000FFFF00000100007F")) == "127.0.0.1"
