"""The port of viewers: slow, silent, huge and broken requests keep no other viewer out, and cost little."""

import socket
from contextlib import ExitStack

import pytest
from seer_host import viewer_port
from seer_host.viewer_port import ViewerHandler, ViewerPort

PATIENCE_S = 120.0


class Handler(ViewerHandler):
    """Answers with what was asked for."""

    def do_GET(self):
        if self.path == "/fails":
            raise KeyError("x")
        self.reply(200, self.server.body or self.path.encode(), {"Content-Type": "text/plain"})

    def do_POST(self):
        self.reply(200, self.rfile.read(int(self.headers["Content-Length"])), {})


@pytest.fixture
def serve(monkeypatch):
    """Return a function that serves at a port of its own, with other limits."""
    with ExitStack() as stack:

        def serve(body=b"", **limits):
            for name, value in limits.items():
                monkeypatch.setattr(viewer_port, name, value)
            port = ViewerPort("127.0.0.1", 0, Handler, "test-viewers").start()
            port.body = body
            stack.callback(port.close)
            return port

        yield serve


def connect(port, sent=b""):
    connection = socket.create_connection(("127.0.0.1", port.port), PATIENCE_S)
    connection.sendall(sent)
    return connection


def whole(connection):
    """Return all that comes until the other end closes the connection."""
    found = b""
    with connection:
        try:
            while piece := connection.recv(65536):
                found += piece
        except ConnectionError:
            pass
    return found


def ask(port, path="/", head=b""):
    return whole(connect(port, b"GET %s HTTP/1.1\r\nHost: x\r\n%s\r\n" % (path.encode(), head)))


def test_a_request_is_answered_and_its_connection_closed(serve):
    port = serve()
    answer = ask(port, "/some?where")
    assert answer.startswith(b"HTTP/1.1 200 OK\r\n")
    assert b"\r\nConnection: close\r\n" in answer
    assert answer.endswith(b"\r\n\r\n/some?where")
    in_pieces = connect(port)
    for each in b"GET /slow HTTP/1.1\r\n\r\n":
        in_pieces.sendall(bytes([each]))
    assert whole(in_pieces).endswith(b"/slow")
    assert whole(connect(port, b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\nabc")).endswith(b"\r\n\r\nabc")


def test_connections_that_send_no_whole_request_are_bounded_and_a_new_viewer_gets_in(serve):
    port = serve(MOST_CONNECTIONS=50)
    with ExitStack() as slow:
        opened = [slow.enter_context(connect(port, b"GET / HTT")) for _ in range(300)]
        assert ask(port).endswith(b"\r\n\r\n/")
        assert len(port._reading) <= 50
        # Those that waited longest have been closed.
        assert whole(opened[0]) == b""


def test_few_files_are_for_few_viewers(serve, monkeypatch):
    monkeypatch.setattr(viewer_port, "allow_files", lambda: 64)
    assert serve()._most == 8


@pytest.mark.parametrize("sent", [b"", b"GET / HTTP/1.1\r\nX: "])
def test_a_head_that_does_not_come_in_time_is_waited_for_no_longer(serve, sent):
    assert whole(connect(serve(HEAD_S=0.05), sent)) == b""


def test_a_head_beyond_all_bounds_is_not_kept(serve):
    connection = connect(serve())
    with connection, pytest.raises(ConnectionError):
        connection.sendall(bytes(1 << 28))  # more than the system keeps for a socket


def test_a_body_that_does_not_come_in_time_frees_what_waits_for_it(serve):
    port = serve(BODY_S=0.05, THREADS=1)
    with connect(port, b"POST / HTTP/1.1\r\nContent-Length: 3\r\n\r\na"):
        assert ask(port).endswith(b"\r\n\r\n/")


def test_a_viewer_that_reads_no_answer_frees_what_sends_it(serve):
    port = serve(bytes(1 << 26), ANSWER_S=0.05, THREADS=1)
    with connect(port, b"GET / HTTP/1.1\r\n\r\n"), connect(port, b"GET / HTTP/1.1\r\n\r\n"):
        port.body = b"small"
        assert ask(port).endswith(b"small")


def test_an_answer_arrives_though_its_request_has_more_to_send(serve):
    answer = whole(connect(serve(), b"GET /a HTTP/1.1\r\nContent-Length: 99\r\n\r\n" + bytes(50_000)))
    assert answer.endswith(b"/a")


@pytest.mark.parametrize(
    "garbage",
    [
        b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
        b"\r\n\r\n",
        b"GET\r\n\r\n",
        b"GET http://[bad/ HTTP/1.1\r\n\r\n",
        b"GET / HTTP/9.9\r\n\r\n",
        b"POST / HTTP/1.1\r\nContent-Length: -9\xff\r\n\r\n",
        b"PUT / HTTP/1.1\r\n\r\n",
        b"GET /fails HTTP/1.1\r\n\r\n",
        b"GET / HTTP/1.1\r\n" + b"a: b\r\n" * 5000 + b"\r\n",
    ],
)
def test_broken_requests_write_nothing_and_others_are_answered(serve, garbage, capfd):
    port = serve()
    whole(connect(port, garbage))
    reset = connect(port, garbage)
    reset.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
    reset.close()
    assert ask(port).endswith(b"\r\n\r\n/")
    assert capfd.readouterr() == ("", "")


def test_a_request_that_fails_says_so(serve):
    assert ask(serve(), "/fails").endswith(b"this request has failed: KeyError: 'x'")


def test_a_closed_port_has_closed_its_connections_and_can_be_taken_again(serve):
    port = serve()
    waiting = connect(port, b"GET")
    assert ask(port).endswith(b"\r\n\r\n/")
    port.close()
    assert whole(waiting) == b""
    again = ViewerPort("127.0.0.1", port.port, Handler, "again")
    with pytest.raises(OSError, match="in use"):
        ViewerPort("127.0.0.1", port.port, Handler, "taken")
    again.close()
