"""The draft server's process: it starts or says why not, and nothing that anyone says ends it."""

import asyncio
import json
import os
import select
import signal
import socket
import subprocess
import sys

import psutil
import pytest
from seer_grouped_spec.connection import address_of
from seer_grouped_spec.handshake import HELLO_BYTES, PROTOCOL_VERSION, TOKEN_VARIABLE
from seer_grouped_spec.process import DraftServerError, DraftServerProcess
from seer_grouped_spec.server import is_loopback
from seer_grouped_spec.wire import (
    MAX_MESSAGE_BYTES,
    Append,
    Codec,
    Done,
    Failure,
    Fetch,
    Fetched,
    Register,
    StatsAsked,
    Unregister,
    Update,
    Updated,
)

COMMAND = (sys.executable, "-P", "-m", "seer_grouped_spec.server")


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
    good = Codec.encode(StatsAsked(1))[4:]
    for bad in (b"", b"GET / HTTP/1.1\r\n\r\n", good + good, good[:-1]):
        assert one.say(bad).kind == "message"
    assert isinstance(one.ask(Unregister(5, ["never"])), Done)
    assert one.ask(Fetch.of(6, {})) == Fetched(6, [], [], False)
    refused = one.ask(Update.of(7, [("never", [Append("r", 0, b"\1\0\0\0")])])).refused
    assert [refusal.kind for refusal in refused] == ["unknown_group"]
    assert one.figures()["faults_message"] == 4


def test_an_oversized_message_costs_its_sender_the_connection_and_nobody_else(server, raw):
    bully, other = raw(server), raw(server)
    bully.socket.sendall((MAX_MESSAGE_BYTES + 1).to_bytes(4, "big"))
    assert bully.is_over()
    figures = other.figures()
    assert (figures["messages"], figures["faults_message"]) == (1, 1)


def test_what_speaks_another_protocol_is_survived(server, raw):
    with socket.create_connection(address_of(server.endpoint)) as stranger:
        stranger.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" + bytes(range(256)) * 64)
    figures = raw(server).figures()
    assert (figures["messages"], figures["faults_key"]) == (1, 1)


def test_who_does_not_know_the_token_is_not_heard(start_server, raw):
    server = start_server(token="secret")
    for guess in ("", "Secret", "secre"):
        stranger = raw(server, token=None)
        assert not stranger.meet(guess)
        assert stranger.is_over()
    assert raw(server).figures()["faults_key"] == 3


def test_a_server_of_ours_has_a_token_though_nobody_gave_one(server, start_server, raw):
    assert len(server.token) == 64
    assert server.token != start_server().token
    assert not raw(server, token=None).meet("")


def test_without_a_token_a_server_must_be_told_to_be_insecure(raw):
    refused = subprocess.run(COMMAND, capture_output=True, text=True, timeout=20)
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: every user of this machine could read and write drafts: give a")
    with subprocess.Popen([*COMMAND, "--insecure"], stdout=subprocess.PIPE, text=True) as process:
        try:
            endpoint = json.loads(process.stdout.readline())["endpoint"]
            assert raw(endpoint, token="").figures()["messages"] == 1
        finally:
            process.terminate()


@pytest.mark.parametrize(
    ("options", "error"),
    [
        (["--port", "70000"], "argument --port: 70000 is no port; 0 to 65535 are"),
        (["--port", "-1"], "argument --port: -1 is no port; 0 to 65535 are"),
        (["--port", "1e3"], "argument --port: 1e3 is no port; 0 to 65535 are"),
        (
            ["--memory-mib", "-5"],
            "argument --memory-mib: -5 is no size; more than 0 is, to a PiB",
        ),
        (
            ["--memory-mib", "0"],
            "argument --memory-mib: 0 is no size; more than 0 is, to a PiB",
        ),
        (
            ["--memory-mib", "nan"],
            "argument --memory-mib: nan is no size; more than 0 is, to a PiB",
        ),
        (
            ["--memory-mib", "inf"],
            "argument --memory-mib: inf is no size; more than 0 is, to a PiB",
        ),
        (
            ["--host", "0.0.0.0", "--insecure"],
            "--host 0.0.0.0 can be reached from other machines: give a token, with --token-file or"
            " SEER_DRAFT_TOKEN",
        ),
    ],
)
def test_what_cannot_be_is_refused_in_one_sentence(options, error):
    result = subprocess.run([*COMMAND, *options], capture_output=True, text=True, timeout=20)
    assert (result.returncode, result.stderr) == (2, f"error: {error}\n")


def test_the_directory_it_is_started_in_is_not_imported_from(tmp_path, monkeypatch, start_server, raw):
    for name in ("structlog.py", "msgspec.py", "seer_core.py", "attrs.py"):
        (tmp_path / name).write_text("raise SystemExit('imported from the working directory')")
    monkeypatch.chdir(tmp_path)
    assert raw(start_server()).figures()["messages"] == 1


def test_beyond_loopback_a_token_is_demanded(start_server):
    result = subprocess.run([*COMMAND, "--host", "0.0.0.0"], capture_output=True, text=True, timeout=20)
    assert "--host 0.0.0.0 can be reached from other machines: give a token" in result.stderr
    assert result.returncode == 2
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
    assert line == {"endpoint": line["endpoint"], "pid": process.pid, "protocol": PROTOCOL_VERSION}
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
    assert isinstance(good.ask(Register(1, [("g", 60.0)])), Done)
    for number in range(50):
        assert bad.say(os.urandom(64)).kind == "message"
        update = Update.of(number, [("g", [Append("r", number, b"\7\0\0\0")])])
        assert good.ask(update) == Updated(number, [])
    assert good.figures()["tokens_in"] == 50


MIB = 1 << 20
LIMIT_MIB = 64
SLACK_MIB = 40
"""What the allocator may keep on top of the limit and of the messages under way."""


class Attacked:
    """A server with a small limit, and the most memory that its process has ever taken since it was up."""

    def __init__(self, start_server):
        self.server = start_server(memory_bytes=LIMIT_MIB * MIB)
        self.process = psutil.Process(self.server.pid)
        self.before = self.process.memory_info().rss

    def grown_mib(self):
        with open(f"/proc/{self.server.pid}/status") as status:
            (peak,) = [int(line.split()[1]) << 10 for line in status if line.startswith("VmHWM:")]
        return (peak - self.before) / MIB

    def holds(self, raw):
        """Check that the server is within its limit, and answers."""
        assert raw(self.server).figures()["groups"] >= 0
        assert self.grown_mib() < LIMIT_MIB + LIMIT_MIB / 8 + SLACK_MIB
        return True


@pytest.fixture
def attacked(start_server):
    return Attacked(start_server)


def flood(one, data, total_bytes):
    """Send until so much has gone out, the connection is closed, or nobody reads for a second."""
    one.socket.settimeout(1.0)
    sent = 0
    try:
        while sent < total_bytes:
            sent += one.socket.send(data)
    except OSError:
        pass
    return sent


def test_strangers_can_make_it_hold_next_to_nothing(attacked, raw):
    strangers = [raw(attacked.server, token=None) for _ in range(200)]
    for one in strangers:
        flood(one, b"\0" * MIB, 8 * MIB)
    assert attacked.holds(raw)
    assert attacked.grown_mib() < SLACK_MIB


def test_messages_without_end_take_no_more_memory_than_allowed(attacked, raw):
    head = MAX_MESSAGE_BYTES.to_bytes(4, "big")
    peers = [raw(attacked.server) for _ in range(200)]
    for one in peers:
        one.socket.sendall(head)
        flood(one, b"\0" * MIB, MAX_MESSAGE_BYTES - 1)  # 400 MB in all, and none is complete
    assert attacked.holds(raw)
    assert raw(attacked.server).figures()["faults_room"] > 100


def test_answers_that_nobody_reads_take_no_more_memory_than_allowed(attacked, raw):
    writer = raw(attacked.server)
    writer.ask(Register(1, [("g", 600.0)]))
    for number in range(64):
        writer.ask(Update.of(number, [("g", [Append(f"r{number}", 0, b"\1\0\0\0" * (128 << 10))])]))
    again = Codec.encode(Fetch.of(2, {"g": {}}))  # everything anew
    for _ in range(50):
        reader = raw(attacked.server)
        reader.ask(Register(1, [("g", 600.0)]))
        flood(reader, again * 1000, len(again) * 100_000)
    assert attacked.holds(raw)


def test_registrations_count(attacked, raw):
    for peer in range(10):
        one = raw(attacked.server)
        for message in range(25):
            names = [(f"{peer}-{message}-{number}-".ljust(400, "x"), 600.0) for number in range(4000)]
            one.ask(Register(message, names))
    figures = raw(attacked.server).figures()
    assert figures["groups_refused"] > 100_000
    assert figures["held_bytes"] <= LIMIT_MIB * MIB
    assert attacked.holds(raw)


def test_parts_in_one_group_count_for_each_who_has_one(attacked, raw):
    names = [(f"g{number}", 600.0) for number in range(4000)]
    peers = [raw(attacked.server) for _ in range(60)]
    for one in peers:
        one.ask(Register(1, names))
    figures = raw(attacked.server).figures()
    assert figures["groups_refused"] > 0
    assert figures["held_bytes"] <= LIMIT_MIB * MIB
    assert attacked.holds(raw)


def test_what_is_said_of_many_small_requests_counts(attacked, raw):
    one = raw(attacked.server)
    for number in range(100):
        one.ask(Register(1, [(f"g{number}", 600.0)]))
        appends = [Append(f"{request}", 0, b"\1\0\0\0") for request in range(4096)]
        one.ask(Update.of(2, [(f"g{number}", appends)]))
    figures = raw(attacked.server).figures()
    assert figures["tokens_in"] > 200_000
    assert figures["held_bytes"] <= LIMIT_MIB * MIB
    assert attacked.holds(raw)


def test_a_message_of_nothing_but_small_parts_takes_no_more_memory_than_allowed(attacked, raw):
    one = raw(attacked.server)
    appends = [Append("r", 0, b"")] * 4096
    body = Codec.encode(Update.of(1, [("g", appends)] * 60))[4:]
    assert len(body) > MAX_MESSAGE_BYTES / 2
    assert isinstance(one.say(body), Failure)
    infos = {f"{group}": {f"{request}": 0 for request in range(4096)} for group in range(60)}
    body = Codec.encode(Fetch.of(1, infos))[4:]
    assert isinstance(one.say(body), Fetched)
    assert attacked.holds(raw)
    assert attacked.grown_mib() < SLACK_MIB


def test_who_stops_in_the_middle_of_a_message_is_closed_and_who_says_nothing_stays(server, raw):
    idle, stuck, stranger = raw(server), raw(server), raw(server, token=None)
    stuck.socket.sendall(b"\0\0\1")
    stranger.socket.sendall(b"S" * (HELLO_BYTES - 1))
    for one in (stranger, stuck):
        one.socket.settimeout(30)
        assert one.is_over()
    figures = idle.figures()
    assert (figures["faults_stranger"], figures["faults_stall"]) == (1, 1)


def test_what_a_client_had_part_in_ends_with_its_connection(server, raw, wait_for):
    one, two = raw(server), raw(server)
    one.ask(Register(1, [("g", 3600.0), ("h", 3600.0)]))
    one.ask(Update.of(2, [("g", [Append("r", 0, b"\1\0\0\0")])]))
    two.ask(Register(1, [("g", 3600.0)]))
    one.socket.close()
    wait_for(lambda: two.figures()["clients"] == 1)
    assert two.figures()["groups"] == 1
    assert two.ask(Fetch.of(3, {})).groups == [("g", [Append("r", 0, b"\1\0\0\0")])]
