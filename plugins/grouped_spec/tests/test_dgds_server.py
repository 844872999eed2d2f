"""The draft server's process: it starts or says why not, and nothing that anyone says ends it."""

import asyncio
import json
import os
import select
import signal
import subprocess
import sys

import pytest
import zmq
from seer_grouped_spec.process import DraftServerError, DraftServerProcess
from seer_grouped_spec.server import is_loopback
from seer_grouped_spec.wire import (
    MAX_MESSAGE_BYTES,
    TOKEN_VARIABLE,
    Append,
    Codec,
    Done,
    Failure,
    Fetch,
    Register,
    StatsAsked,
    Unregister,
    Update,
    Updated,
)

ME = b"0123456789abcdef"
COMMAND = (sys.executable, "-m", "seer_grouped_spec.server")


def is_dead(pid, timeout_s=10):
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], timeout_s)[0])
    finally:
        os.close(descriptor)


def test_garbage_of_all_kinds_is_answered_and_counted_and_the_server_goes_on(server, raw):
    one = raw(server)
    good = Codec.encode(StatsAsked(1))
    assert one.say(b"").kind == "message"
    assert one.say(b"GET / HTTP/1.1\r\n\r\n").kind == "message"
    assert one.say(good, good).kind == "message"
    assert one.say(good[:-1]).kind == "message"
    assert "protocol version 9; this side speaks 1" in one.say(good[:3] + b"\0\x09" + good[5:]).reason
    assert one.ask(StatsAsked(1), b"a key nobody asked for").kind == "key"
    assert isinstance(one.ask(Unregister(5, ME, ["never"])), Done)
    assert one.ask(Fetch(6, ME, {})) == Failure(
        6, "unknown_client", "register first: this client has no group here"
    )
    refused = one.ask(Update(7, ME, [("never", [Append("r", 0, b"\1\0\0\0")])])).refused
    assert [refusal.kind for refusal in refused] == ["unknown_group"]
    figures = one.figures()
    assert (figures["faults_message"], figures["faults_version"], figures["faults_key"]) == (4, 1, 1)


def test_an_oversized_message_costs_its_sender_the_connection_and_nobody_else(server, raw, wait_for):
    bully, other = raw(server), raw(server)
    monitor = bully.socket.get_monitor_socket(zmq.EVENT_DISCONNECTED)
    bully.socket.send(b"x" * (MAX_MESSAGE_BYTES + 1))
    assert monitor.poll(10_000)
    bully.socket.disable_monitor()
    monitor.close()
    assert other.figures()["messages"] == 1


def test_what_is_no_zeromq_at_all_is_survived(server, raw):
    import socket

    host, port = server.endpoint.removeprefix("tcp://").split(":")
    with socket.create_connection((host, int(port))) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 64)
    figures = raw(server).figures()
    assert figures["messages"] - 1 == figures.get("faults_message", 0)  # some of it may look like frames


def test_with_a_token_every_message_must_carry_it(start_server, raw):
    one = raw(start_server(token="secret"))
    assert one.ask(StatsAsked(1)).kind == "key"
    assert one.ask(StatsAsked(1), b"Secret").kind == "key"
    assert one.ask(Register(2, ME, [("g", 5.0)]), b"secre").kind == "key"
    assert one.figures(b"secret")["faults_key"] == 3
    assert one.figures(b"secret")["groups"] == 0


def test_beyond_loopback_a_token_is_demanded(start_server):
    with pytest.raises(DraftServerError, match=r"--host 0.0.0.0 can be reached .* give a token"):
        start_server(host="0.0.0.0")
    assert start_server(host="0.0.0.0", token="secret").endpoint.startswith("tcp://0.0.0.0:")


@pytest.mark.parametrize(
    ("host", "is_local"),
    [
        ("127.0.0.1", True),
        ("127.9.9.9", True),
        ("::1", True),
        ("localhost", True),
        ("0.0.0.0", False),
        ("::", False),
    ],
)
def test_loopback_is_known_by_its_address(host, is_local):
    assert is_loopback(host) is is_local


@pytest.mark.parametrize("text", ["", " \n", "k" * 300])
def test_a_token_file_without_a_fit_token_is_an_error(tmp_path, text):
    path = tmp_path / "token"
    path.write_text(text)
    result = subprocess.run([*COMMAND, "--token-file", path], capture_output=True, text=True, timeout=20)
    assert result.returncode == 2
    assert "1 to 255 are right" in result.stderr


def test_a_port_in_use_is_a_clear_error(server, start_server):
    port = int(server.endpoint.rsplit(":", 1)[1])
    with pytest.raises(DraftServerError, match=rf"status 2\n(.|\n)*cannot listen on 127.0.0.1, port {port}"):
        start_server(port=port)


def test_a_server_that_does_not_start_in_time_is_ended():
    server = DraftServerProcess(start_timeout_s=0.0)
    with pytest.raises(DraftServerError, match="not ready after 0 s"):
        asyncio.run(server.start())
    assert server.pid is None
    with pytest.raises(DraftServerError, match="not running"):
        _ = server.endpoint


def test_stop_ends_it_and_may_be_called_again(start_server):
    server = start_server()
    pid = server.pid
    asyncio.run(server.stop())
    assert is_dead(pid, 0)
    asyncio.run(server.stop())
    asyncio.run(server.start())
    os.kill(server.pid, signal.SIGSTOP)
    asyncio.run(server.stop())
    assert server.pid is None


def test_sigterm_ends_it_cleanly_and_it_speaks_one_line(tmp_path):
    token = tmp_path / "token"
    token.write_text("from-a-file\n")
    process = subprocess.Popen(
        [*COMMAND, "--host", "::1", "--token-file", token], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    line = json.loads(process.stdout.readline())
    assert line == {"endpoint": line["endpoint"], "pid": process.pid, "protocol": 1}
    assert line["endpoint"].startswith("tcp://[::1]:")
    process.terminate()
    assert process.communicate(timeout=10) == (b"", b"")
    assert process.returncode == 0


def test_it_dies_with_its_parent():
    script = (
        "import asyncio, os; from seer_grouped_spec.process import DraftServerProcess;"
        "server = DraftServerProcess(); asyncio.run(server.start());"
        "print(server.pid, flush=True); os._exit(9)"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert result.returncode == 9, result.stderr
    assert is_dead(int(result.stdout))


def test_the_token_is_not_on_the_command_line(start_server):
    pid = start_server(token="secret").pid
    with open(f"/proc/{pid}/cmdline", "rb") as command:
        assert b"secret" not in command.read()
    assert TOKEN_VARIABLE not in os.environ


def test_garbage_and_good_words_may_alternate(server, raw):
    good, bad = raw(server), raw(server)
    assert isinstance(good.ask(Register(1, ME, [("g", 60.0)])), Done)
    for number in range(50):
        assert bad.say(os.urandom(64)).kind == "message"
        update = Update(number, ME, [("g", [Append("r", number, b"\7\0\0\0")])])
        assert good.ask(update) == Updated(number, [])
    assert good.figures()["tokens_in"] == 50
