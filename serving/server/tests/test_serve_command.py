"""``seer serve`` as a process: it serves, ends in order, and gives the same after it was killed."""

import json
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
from contextlib import ExitStack, suppress

import httpx
import pytest
from seer_server.cli import _bind
from seer_server.http import is_loopback
from seer_server.tokens import own_token, read_token

from seer_core.errors import ConfigError
from tests.support.eventually import eventually
from tests.support.patience import PATIENCE_S

CONFIG = """
[seer]
plugins = ["divided_rollout"]
engine = "sim"

[rollout]
max_tokens = 40
"""


@pytest.fixture
def start(tmp_path):
    """Return a function that starts the command and returns the process with its address."""
    processes = []
    (tmp_path / "seer.toml").write_text(CONFIG)

    def run(*arguments, files=None):
        command = [
            sys.executable,
            "-c",
            "from seer_main import main; main()",
            "serve",
            str(tmp_path / "seer.toml"),
        ]
        if files is not None:  # how many it may have open, and may allow itself
            soft, hard = files if isinstance(files, tuple) else (files, files)
            command = ["bash", "-c", f'ulimit -Sn {soft}; ulimit -Hn {hard}; exec "$@"', "bash", *command]
        process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        for line in process.stderr:
            if line.startswith("dashboard: "):
                process.dashboard = line.split()[1]
            found = re.search(r"running on (http://\S+)", line)
            if found:
                return process, found[1]
        return process, ""

    yield run
    for process in processes:
        process.kill()
        process.wait(PATIENCE_S)
        process.stderr.close()


def ask(url):
    body = {"prompt": "a", "n": 2, "group": "g", "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, headers=bearer(url), timeout=PATIENCE_S).json()[
        "choices"
    ]


def half_a_request(url):
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {bearer(url)['Authorization']}"
    )
    return f"{head}\r\nContent-Length: 9\r\n\r\n{{".encode()


def bearer(url):
    token, _ = own_token(httpx.URL(url).port)
    return {"Authorization": f"Bearer {token}"}


def test_a_server_that_was_killed_gives_the_same_when_it_is_back_and_ends_in_order(start):
    process, url = start("--port", "0")
    first = ask(url)
    process.kill()
    process.wait(PATIENCE_S)
    process, url = start("--port", "0")
    assert ask(url) == first
    process.send_signal(signal.SIGTERM)
    assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_terminal_that_closes_ends_it_in_order(start):
    process, url = start("--port", "0", "--drain-s", "1")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), 60) as client:
        client.sendall(half_a_request(url))
        ask(url)
        process.send_signal(signal.SIGHUP)
        rest = process.stderr.read()
    assert process.wait(PATIENCE_S) == 0
    assert "Application shutdown complete" in rest
    assert "Traceback" not in rest


def test_a_taken_port_is_reported_before_engines_start(start):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} of 127.0.0.1 is taken; give another one: --port"):
            _bind("127.0.0.1", port)
        process, url = start("--port", str(port))
        assert (url, process.wait(PATIENCE_S)) == ("", 2)


def test_it_ends_though_a_client_never_comes_to_an_end(start):
    process, url = start("--port", "0", "--drain-s", "1")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), 60) as client:
        client.sendall(half_a_request(url))
        ask(url)  # so the server has seen what came before
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_a_second_ctrl_c_gives_up_what_is_unfinished_and_ends_in_order_all_the_same(start):
    process, url = start("--port", "0", "--drain-s", "600")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), 60) as client:
        client.sendall(half_a_request(url))
        ask(url)  # so the server has seen what came before
        process.send_signal(signal.SIGINT)
        wait_for(process, "Waiting for connections to close")
        process.send_signal(signal.SIGINT)
        wait_for(process, "Application shutdown complete")
        process.wait(PATIENCE_S)


def wait_for(process, words):
    """Read until the server has said this, which it does within minutes or is killed."""
    late = threading.Timer(300, process.kill)
    late.start()
    try:
        assert any(words in line for line in process.stderr), f"it never said {words!r}"
    finally:
        late.cancel()


def test_of_more_idle_connections_than_it_may_have_files_some_make_room(start):
    files = 200
    process, url = start("--port", "0", files=files)
    first = ask(url)
    address = ("127.0.0.1", httpx.URL(url).port)

    def asked():
        with suppress(httpx.TransportError):  # before there was room again
            return ask(url)

    with ExitStack() as idle:
        for _ in range(2 * files):
            idle.enter_context(socket.create_connection(address, 60))
        found = eventually(asked)
    assert found == first
    assert process.poll() is None


def test_ten_thousand_idle_connections_do_not_keep_others_out(start):
    soft, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    count = min(10_000, most - 500)  # this process holds as many ends as the server
    _, url = start("--port", "0", files=(256, most))
    address = ("127.0.0.1", httpx.URL(url).port)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    try:
        with ExitStack() as idle:
            first = ask(url)
            for _ in range(count):
                idle.enter_context(socket.create_connection(address, 60))
            assert ask(url) == first
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, most))


GARBAGE = [
    b"\x16\x03\x01\x02\x00\x01\x00\r\n\r\n",
    b"GET\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nContent-Length: x\r\n\r\n",
    b"GET http://[bad/ HTTP/1.1\r\nHost: [\r\n\r\n",
    b"GET /v1/state HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer \xff\r\n\r\n",
    b"GET / HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n\r\n",
]
WEBSOCKET = (
    b"GET /v1/state HTTP/1.1\r\nHost: a\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: c2VlcnNlZXJzZWVyc2Vlcg==\r\n\r\n"
)


def test_what_is_no_http_is_refused_and_leaves_nothing_in_the_log(start):
    process, url = start("--port", "0")
    address = ("127.0.0.1", httpx.URL(url).port)
    for data in [*GARBAGE, WEBSOCKET]:
        with socket.create_connection(address, 60) as client:
            client.sendall(data)
            assert client.recv(1000).startswith(b"HTTP/1.1 4"), data
    for size in range(1, len(WEBSOCKET), 40):  # resets
        with socket.create_connection(address, 60) as client:
            client.sendall(WEBSOCKET[:size])
            client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    assert len(ask(url)) == 2
    process.send_signal(signal.SIGTERM)
    rest = process.stderr.read()
    assert "Application shutdown complete" in rest
    assert not re.search("Traceback|WARNING|ERROR|Invalid|WebSocket", rest), rest


def test_it_lets_no_other_machine_in_without_a_token(start, tmp_path):
    process, url = start("--host", "0.0.0.0", "--port", "0")
    assert (url, process.wait(PATIENCE_S)) == ("", 2)
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ConfigError, match="16 ASCII characters"):
        read_token(tmp_path / "token")
    (tmp_path / "token").write_text(json.dumps("a" * 30) + "\n")
    assert read_token(tmp_path / "token") == json.dumps("a" * 30)
    with pytest.raises(ConfigError, match="cannot read"):
        read_token(tmp_path / "nothing")
    assert [is_loopback(name) for name in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "a.example")] == [
        True,
        True,
        True,
        False,
        False,
    ]


@pytest.fixture
def runtime_dir(tmp_path, monkeypatch):
    (tmp_path / "runtime").mkdir()
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "runtime"))
    return tmp_path / "runtime" / "seer"


def test_a_server_makes_a_token_that_its_user_alone_can_read_and_each_start_a_new_one(start, runtime_dir):
    process, url = start("--port", "0")
    port = httpx.URL(url).port
    [path] = runtime_dir.iterdir()
    assert path.name == f"{port}.token"
    assert (path.stat().st_mode & 0o777, runtime_dir.stat().st_mode & 0o777) == (0o600, 0o700)
    for path_of in ("/v1/completions", "/v1/weights", "/v1/sleep"):
        assert httpx.post(f"{url}{path_of}", json={}, timeout=PATIENCE_S).status_code == 401
    assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 401
    assert httpx.get(f"{url}/health", timeout=PATIENCE_S).status_code == 200
    first, before = ask(url), path.read_text()
    process.kill()
    process.wait(PATIENCE_S)
    process, url = start("--port", str(port))
    assert own_token(port)[0] == path.read_text().strip() != before.strip()
    assert ask(url) == first
    stolen = {"Authorization": f"Bearer {before.strip()}"}
    assert httpx.get(f"{url}/v1/state", headers=stolen, timeout=PATIENCE_S).status_code == 401


def test_completions_may_be_open_and_what_commands_the_engines_is_not(start, runtime_dir, tmp_path):
    _, url = start("--port", "0", "--open-completions")
    body = {"prompt": "a", "max_tokens": 2}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200
    assert httpx.get(f"{url}/v1/models", timeout=PATIENCE_S).status_code == 200
    page = {"Origin": "https://a.example"}
    assert httpx.post(f"{url}/v1/completions", json=body, headers=page, timeout=PATIENCE_S).status_code == 403
    for method, path in (("POST", "weights"), ("PUT", "weights"), ("POST", "sleep"), ("GET", "state")):
        assert httpx.request(method, f"{url}/v1/{path}", timeout=PATIENCE_S).status_code == 401
    asked = {"directory": str(tmp_path)}
    answer = httpx.post(f"{url}/v1/weights", json=asked, headers=bearer(url), timeout=PATIENCE_S)
    assert answer.status_code == 403
    assert "start it with --weights-root, or send the weights" in answer.json()["error"]["message"]


def test_weights_are_loaded_from_below_the_roots_alone(start, runtime_dir, tmp_path):
    roots, elsewhere = tmp_path / "roots", tmp_path / "elsewhere"
    roots.mkdir()
    elsewhere.mkdir()
    (roots / "link").symlink_to(elsewhere)
    _, url = start("--port", "0", "--weights-root", str(roots))

    def status(directory):
        asked = {"directory": str(directory)}
        return httpx.post(
            f"{url}/v1/weights", json=asked, headers=bearer(url), timeout=PATIENCE_S
        ).status_code

    assert status(elsewhere) == status(roots / "link") == status(roots / ".." / "elsewhere") == 403
    assert status(roots) != 403


def test_a_token_that_others_can_read_is_refused(runtime_dir):
    token, path = own_token(4711)
    assert own_token(4711) == (token, path)
    assert own_token(4711, new=True)[0] != token
    assert [each.name for each in runtime_dir.iterdir()] == [path.name]
    path.chmod(0o640)
    with pytest.raises(ConfigError, match="can be read or changed by others"):
        own_token(4711)
    path.unlink()
    runtime_dir.chmod(0o777)
    with pytest.raises(ConfigError, match="can be read or changed by others"):
        own_token(4711)


def test_its_page_shows_what_it_serves_and_ends_with_it(start):
    process, url = start("--port", "0", "--open-completions", "--dashboard")
    page = re.fullmatch(r"(http://[^/]*)/\?token=(.*)", process.dashboard)
    body = {"prompt": "how far", "n": 3, "max_tokens": 20}
    assert httpx.post(f"{url}/v1/completions", json=body, timeout=PATIENCE_S).status_code == 200

    def served():
        runs = httpx.get(f"{page[1]}/figures", headers={"X-Seer-Token": page[2]}).json()["runs"]
        return runs if runs and runs[0]["figures"]["requests"] == 3 else None

    runs = eventually(served)
    assert [run["name"] for run in runs] == ["now"]
    process.send_signal(signal.SIGINT)
    assert process.wait(PATIENCE_S) == 0
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{page[1]}/figures")
