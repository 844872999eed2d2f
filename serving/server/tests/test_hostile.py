"""Hostile requests: each gets the field's status and OpenAI's error body, and nothing is left of it."""

import json
import re
import socket
import struct
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import httpx
import pytest
from seer_server import http, make_app
from seer_server.protocol import CompletionRequest, records
from seer_session.runtime import Runtime

from seer_core.errors import PromptError
from tests.support.eventually import eventually

PATIENCE_S = 60
TOKEN = "a-token-of-the-run"
JSON = {"Content-Type": "application/json"}
MINE = {"Authorization": f"Bearer {TOKEN}"}
COMPLETIONS, CHAT, BATCHES = "/v1/completions", "/v1/chat/completions", "/v1/rollouts"
RESERVATIONS, ROWS, WEIGHTS = "/v1/reservations", "/v1/rows", "/v1/weights"
RECORD = {"prompt_token_ids": [5], "group_id": "g"}


@pytest.fixture(scope="module")
def served(config, served_class):
    """One server for all of them."""
    app = make_app(partial(Runtime.from_config, config), token=TOKEN, most_requests=4096)
    with served_class(app) as running:
        yield running


def ask(served, path, body, method="POST", **headers):
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {**JSON, **MINE, **headers}
    return httpx.request(method, f"{served.url}{path}", content=content, headers=headers, timeout=PATIENCE_S)


def expect_nothing_left(served):
    def nothing():
        state = httpx.get(f"{served.url}/v1/state", headers=MINE, timeout=PATIENCE_S).json()
        return (state["unfinished"], state["reserved"], state["changing"]) == (0, 0, False)

    eventually(nothing)


def expect_refused(answer, status):
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert error["code"] == status
    assert error["type"] == ("invalid_request_error" if status < 500 else "server_error")
    assert 0 < len(error["message"]) < 1100
    assert error["message"].isprintable()


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        (COMPLETIONS, b"", 400),
        (COMPLETIONS, b"[" * 200_000, 400),
        (COMPLETIONS, b'{"prompt": ' + b"[" * 5000 + b"]" * 5000 + b"}", 400),
        (COMPLETIONS, b'{"prompt": "\xff\xfe"}', 400),
        (COMPLETIONS, b'{"prompt": "\\ud800"}', 400),
        (COMPLETIONS, b'{"prompt": "a", "temperature": NaN}', 400),
        (COMPLETIONS, b'{"prompt": "a", "temperature": 1e999}', 400),
        (COMPLETIONS, b'{"prompt": "a", "timeout_s": -Infinity}', 400),
        (COMPLETIONS, b'{"prompt": "a", "n": ' + b"9" * 5000 + b"}", 400),
        (COMPLETIONS, {"prompt": "a", "n": -1}, 400),
        (COMPLETIONS, {"prompt": "a", "n": 65_000}, 400),
        (COMPLETIONS, {"prompt": [[5]] * 100_000}, 400),
        (COMPLETIONS, {"prompt": [5] * 100_000}, 400),
        (COMPLETIONS, {"prompt": [2**70]}, 400),
        (COMPLETIONS, {"prompt": "a", "max_tokens": -1}, 400),
        (COMPLETIONS, {"prompt": "a", "max_tokens": 2**62}, 400),
        (COMPLETIONS, {"prompt": "a", "seed": -2}, 400),
        (COMPLETIONS, {"prompt": "a", "seed": 2**80}, 400),
        (COMPLETIONS, {"prompt": "a", "top_p": 7}, 400),
        (COMPLETIONS, {"prompt": "a", "priority": 10**300}, 400),
        (COMPLETIONS, {"prompt": "a", "group": "g\n\x1b[2J"}, 400),
        (COMPLETIONS, {"prompt": {"a": 1}}, 400),
        (COMPLETIONS, {"prompt": "a", "model": "\x1b[2J"}, 404),
        (COMPLETIONS, ["prompt"], 400),
        (CHAT, {"messages": []}, 400),
        (CHAT, {"messages": "hello"}, 400),
        (CHAT, {"messages": [{"role": 5, "content": "a"}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, 400),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400),
        (BATCHES, {"records": []}, 400),
        (BATCHES, {"records": [RECORD, RECORD]}, 400),
        (BATCHES, {"records": [RECORD], "iteration": -1}, 400),
        (BATCHES, {"records": [RECORD], "weight_version": 9}, 409),
        (BATCHES, {"records": [RECORD], "progress_s": 1e-9}, 400),
        (BATCHES, {"records": [{**RECORD, "metadata": 5}]}, 400),
        (RESERVATIONS, {"groups": [{"n": 3}]}, 400),
        (RESERVATIONS, {"groups": [{"group_id": "a"}, {"group_id": "a"}]}, 400),
        (RESERVATIONS, {"groups": [{"group_id": f"{number}", "n": 65_536} for number in range(500)]}, 400),
        (RESERVATIONS, {"groups": [{"group_id": "a"}], "prompt_wait_s": -1}, 400),
        (ROWS, {"group_id": "of none", "index": 0}, 404),
        (ROWS, {"group_id": "x" * 100_000, "index": 0}, 404),
        (ROWS, {"group_id": "a", "index": -1}, 400),
        ("/v1/abort", {"groups": "a"}, 400),
        ("/v1/sleep", {"wait_s": -1}, 400),
        ("/v1/sleep", {"wait_s": 1e9}, 400),
        (WEIGHTS, {}, 400),
        (WEIGHTS, {"directory": ""}, 400),
        (WEIGHTS, {"directory": "x" * 10_000}, 400),
        (WEIGHTS, {"directory": "/nowhere", "version": -3}, 400),
        (WEIGHTS, {"directory": "/nowhere", "version": 2**63}, 400),
        (WEIGHTS, b'{"directory": "/nowhere", "version": ' + b"9" * 400 + b"}", 400),
        (WEIGHTS, {"directory": "/now\0here"}, 400),
        (WEIGHTS, {"directory": "\0"}, 400),
        (WEIGHTS, {"shared": {"path": "/etc/passwd", "tensors": [], "digest": "0" * 64}}, 400),
        (WEIGHTS, {"shared": {"path": "/proc/1/fd/99999", "tensors": [], "digest": "0" * 64}}, 400),
    ],
)
def test_what_is_wrong_is_said_and_leaves_nothing(served, path, body, status):
    expect_refused(ask(served, path, body), status)
    expect_nothing_left(served)


@pytest.mark.parametrize(
    ("method", "path", "headers", "status"),
    [
        ("GET", "/", {}, 404),
        ("POST", "/v1/embeddings", {}, 404),
        ("GET", "/v1/%1b[2J/../x", {}, 404),
        ("GET", COMPLETIONS, {}, 405),
        ("DELETE", WEIGHTS, {}, 405),
        ("PUT", "/v1/sleep", {}, 405),
        ("POST", COMPLETIONS, {"Content-Type": "text/plain"}, 415),
        ("POST", BATCHES, {"Content-Type": "application/x-www-form-urlencoded"}, 415),
        ("POST", "/v1/sleep", {"Content-Type": ""}, 415),
        ("POST", COMPLETIONS, {"Authorization": f"Basic {TOKEN}"}, 401),
        ("POST", COMPLETIONS, {"Authorization": TOKEN}, 401),
        ("POST", COMPLETIONS, {"Authorization": "Bearer"}, 401),
        ("PUT", WEIGHTS, {"Authorization": f"Bearer {TOKEN}x"}, 401),
        ("DELETE", f"{RESERVATIONS}/x", {"Authorization": "Bearer \xff".encode("latin-1")}, 401),
        ("POST", COMPLETIONS, {"X-Seer-Priority": "9" * 5000}, 400),
        ("POST", COMPLETIONS, {"X-Seer-Group": "g" * 5000}, 400),
    ],
)
def test_what_comes_by_a_wrong_way_is_said(served, method, path, headers, status):
    answer = ask(served, path, {"prompt": "a"}, method, **headers)
    expect_refused(answer, status)
    assert ("allow" in answer.headers) == (status == 405)
    assert ("www-authenticate" in answer.headers) == (status == 401)
    expect_nothing_left(served)


@pytest.mark.parametrize("path", ["/v1/sleep", "/v1/wake"])
def test_a_page_in_a_browser_cannot_put_instances_to_sleep_by_an_empty_body(served, path):
    expect_refused(httpx.post(f"{served.url}{path}", headers=MINE, timeout=PATIENCE_S), 415)


@pytest.mark.parametrize(
    ("query", "body"),
    [
        ("version=abc", b""),
        ("version=0", b""),
        ("version=" + "9" * 400, b""),
        ("version=" + "9" * 5000, b""),
        (f"version={2**63}", b""),
        (f"version=-{2**63}", b""),
        ("wait_s=nan", b""),
        ("unknown=1", b""),
        ("", b""),
        ("", b"\xff" * 8),
        ("", (2).to_bytes(8, "little") + b"{}"),
        ("", (5).to_bytes(8, "little") + b"[[[[["),
        ("", (1 << 20).to_bytes(8, "little") + b"{"),
        ("", b'\x3d\0\0\0\0\0\0\0{"a":{"dtype":"F32","shape":[-1],"data_offsets":[4,0]}}      '),
    ],
)
def test_weights_that_are_none_are_refused(served, query, body):
    url = f"{served.url}{WEIGHTS}?{query}"
    expect_refused(httpx.put(url, content=body, headers=MINE, timeout=PATIENCE_S), 400)
    expect_nothing_left(served)


def exchange(served, data):
    """Send bytes, and return the status of what comes back until the server closes."""
    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), PATIENCE_S) as client:
        client.sendall(data)
        found = b"".join(iter(lambda: client.recv(1 << 16), b""))
    return int(re.match(rb"HTTP/1.1 (\d+)", found)[1]), found


def head(path=COMPLETIONS, **headers):
    lines = {"Host": "a", **JSON, **MINE, "Connection": "close", **headers}
    text = "".join(f"{name.replace('_', '-')}: {value}\r\n" for name, value in lines.items())
    return f"POST {path} HTTP/1.1\r\n{text}\r\n".encode()


def test_bodies_that_stall_are_given_up(served, monkeypatch):
    monkeypatch.setattr(http, "STALLED_S", 0.2)
    for path in (COMPLETIONS, BATCHES, ROWS):
        status, body = exchange(served, head(path, Content_Length=100) + b'{"prompt"')
        assert (status, b"nothing more of the body" in body) == (408, True)
        status, body = exchange(served, head(path, Transfer_Encoding="chunked") + b'5\r\n{"pro\r\n')
        assert (status, b"invalid_request_error" in body) == (408, True)
    expect_nothing_left(served)


@pytest.mark.parametrize(
    "data",
    [
        b"SSH-2.0-OpenSSH_9.6\r\n\r\n",
        b"POST /v1/completions HTTP/9.9\r\n\r\n",
        head(Content_Length=-5),
        head(Content_Length="five"),
        head(Transfer_Encoding="chunked") + b"zz\r\nxx\r\n",
    ],
)
def test_what_is_no_http_is_a_400(served, data):
    assert exchange(served, data)[0] == 400
    expect_nothing_left(served)


def test_more_prompts_than_any_batch_has_are_refused_before_they_are_looked_at():
    with pytest.raises(PromptError, match="70,000 prompts in one request"):
        records(CompletionRequest(prompt=[[5]] * 70_000), "g")


def test_a_body_that_is_too_large_is_a_413(served):
    expect_refused(ask(served, COMPLETIONS, b" " * (http.LARGEST_BODY + 1)), 413)
    expect_nothing_left(served)


def test_a_hundred_hostile_clients_at_once_keep_no_other_from_an_answer(served):
    bodies = [b"[" * 1000, b'{"n": NaN}', json.dumps({"prompt": "a", "n": -1}).encode(), b"\xff"]

    def wrong(number):
        return ask(served, COMPLETIONS, bodies[number % len(bodies)]).status_code

    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(wrong, range(100))) == {400}
        more = {"Authorization": f"bearer {TOKEN}", "X-Junk": "x" * 100_000}
        good = ask(served, COMPLETIONS, {"prompt": "a", "max_tokens": 3}, **more)
    assert good.status_code == 200
    expect_nothing_left(served)


def test_what_goes_wrong_within_is_a_500_in_the_same_words(serve_sim, monkeypatch, capfd):
    def fail(*_, **__):
        raise ZeroDivisionError

    with serve_sim() as served:
        monkeypatch.setattr("seer_session.runtime.Runtime.groups", fail)
        expect_refused(ask(served, COMPLETIONS, {"prompt": "a"}), 500)
        monkeypatch.undo()
        assert ask(served, COMPLETIONS, {"prompt": "a", "max_tokens": 2}).status_code == 200


@pytest.mark.parametrize("path", ["/", "/v1/nothing", "/v1/state", "/v1/models/", "/docs", "/healthy"])
@pytest.mark.parametrize("method", ["GET", "POST", "OPTIONS"])
def test_without_the_token_no_path_and_no_method_is_looked_at(served, method, path):
    for headers in ({}, {"Authorization": "Bearer x"}, {"Host": "[bad"}):
        answer = httpx.request(method, f"{served.url}{path}", headers=headers, timeout=PATIENCE_S)
        expect_refused(answer, 401)


JUNK = (
    b"GET http://[bad/ HTTP/1.1\r\nHost: a\r\n\r\n",
    b"GET //[bad/ HTTP/1.1\r\nHost: [bad\r\n\r\n",
    b"GET /v1/models/ HTTP/1.1\r\nHost: [bad\r\n\r\n",
    b"GET /x HTTP/1.1\r\nHost: \xff\xfe\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: [::\r\n\r\n",
    b"CONNECT [bad HTTP/1.1\r\n\r\n",
    b"GET /%ff%fe HTTP/1.1\r\n\r\n",
    b"GET /v1/state HTTP/1.1\r\nAuthorization: Bearer \xff\r\n\r\n",
    b"GET / HTTP/1.1\r\nConnection: upgrade\r\nUpgrade: websocket\r\n\r\n",
    b"PUT /v1/weights?version=%zz HTTP/1.1\r\nContent-Length: 10\r\n\r\nab",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: " + b"9" * 99 + b"\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\n\r\n",
    b"\x16\x03\x01\x02\x00",
    b"",
)
"""Bytes that are no request, or a strange one."""


@pytest.mark.parametrize("token", [TOKEN, None])
def test_strange_bytes_and_resets_leave_no_traceback(serve_sim, token, capfd):
    with serve_sim(token=token) as served:
        for junk in JUNK:
            for reset in (False, True):
                with socket.create_connection(
                    ("127.0.0.1", httpx.URL(served.url).port), PATIENCE_S
                ) as client:
                    client.sendall(junk)
                    if reset:
                        linger = struct.pack("ii", 1, 0)
                        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                    else:
                        client.shutdown(socket.SHUT_WR)
                        assert b"500 Internal" not in b"".join(iter(lambda: client.recv(1 << 16), b""))
        assert httpx.get(f"{served.url}/health", timeout=PATIENCE_S).status_code == 200
    found = capfd.readouterr()
    assert "Traceback" not in found.err + found.out


PAGES = (
    {"Host": "a.example"},
    {"Host": "a.example:8000"},
    {"Host": "[nonsense"},
    {"Origin": "https://a.example"},
    {"Origin": "null"},
    {"Origin": "http://127.0.0.1.a.example"},
)
"""Headers of requests that a browser on this machine may send for a page from elsewhere."""


@pytest.mark.parametrize(("method", "path"), [("POST", WEIGHTS), ("POST", COMPLETIONS), ("GET", "/v1/state")])
def test_without_a_token_a_web_page_from_elsewhere_is_refused(serve_sim, method, path):
    with serve_sim() as served:
        for headers in PAGES:
            answer = httpx.request(method, f"{served.url}{path}", headers=headers, timeout=PATIENCE_S)
            expect_refused(answer, 403)
            assert "bring the token" in answer.json()["error"]["message"]
        for place in ("localhost", "localhost:3000", "127.0.0.1:8000", "[::1]:8000"):
            headers = {"Host": place, "Origin": f"http://{place}"}
            assert httpx.get(f"{served.url}/v1/state", headers=headers, timeout=PATIENCE_S).status_code == 200


def test_with_the_token_a_proxy_may_name_another_host(served):
    headers = {**MINE, "Host": "rollouts.example", "Origin": "https://rollouts.example"}
    assert httpx.get(f"{served.url}/v1/state", headers=headers, timeout=PATIENCE_S).status_code == 200


def test_weights_are_received_one_at_a_time(served, monkeypatch):
    def put(status, before):
        answer = httpx.put(f"{served.url}{WEIGHTS}", content=b"", headers=MINE, timeout=PATIENCE_S)
        assert answer.status_code in (status, before)
        return answer if answer.status_code == status else None

    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), PATIENCE_S) as slow:
        slow.sendall(
            f"PUT {WEIGHTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {MINE['Authorization']}\r\n"
            "Content-Length: 1000\r\n\r\n".encode()
            + b"\x10"
        )
        answer = eventually(lambda: put(503, before=400))  # until the other one has arrived
        assert "other weights are being received" in answer.json()["error"]["message"]
        assert answer.headers["Retry-After"] == "1"
    eventually(lambda: put(400, before=503))


def test_weights_that_stop_arriving_are_given_up(served, monkeypatch):
    monkeypatch.setattr("seer_server.http.STALLED_S", 0.2)
    with socket.create_connection(("127.0.0.1", httpx.URL(served.url).port), PATIENCE_S) as slow:
        slow.sendall(
            f"PUT {WEIGHTS} HTTP/1.1\r\nHost: localhost\r\nAuthorization: {MINE['Authorization']}\r\n"
            "Content-Length: 1000\r\n\r\n".encode()
            + b"\x10"
        )
        assert slow.recv(1000).startswith(b"HTTP/1.1 408")
