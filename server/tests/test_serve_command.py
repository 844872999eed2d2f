"""``seer serve`` as a process: it serves, ends in order, and tells the same after it was killed."""

import json
import re
import signal
import socket
import subprocess
import sys

import httpx
import pytest
from seer_server.cli import _is_loopback, _read_token

from seer_core.errors import ConfigError

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

    def run(*arguments):
        command = [
            sys.executable,
            "-c",
            "from seer_main import main; main()",
            "serve",
            str(tmp_path / "seer.toml"),
        ]
        process = subprocess.Popen([*command, *arguments], stderr=subprocess.PIPE, text=True)
        processes.append(process)
        for line in process.stderr:
            found = re.search(r"running on (http://\S+)", line)
            if found:
                return process, found[1]
        return process, ""

    yield run
    for process in processes:
        process.kill()
        process.wait(60)
        process.stderr.close()


def ask(url):
    body = {"prompt": "a", "n": 2, "group": "g", "return_token_ids": True}
    return httpx.post(f"{url}/v1/completions", json=body, timeout=60).json()["choices"]


def test_a_server_that_was_killed_tells_the_same_when_it_is_back_and_ends_in_order(start):
    process, url = start("--port", "0")
    first = ask(url)
    process.kill()
    process.wait(60)
    process, url = start("--port", "0")
    assert ask(url) == first
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_it_ends_though_a_client_never_comes_to_an_end(start):
    process, url = start("--port", "0", "--drain-s", "1")
    with socket.create_connection(("127.0.0.1", httpx.URL(url).port), 60) as client:
        client.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Length: 9\r\n\r\n{")
        ask(url)  # so the server has seen what came before
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) in (0, -signal.SIGTERM, 128 + signal.SIGTERM)


def test_it_lets_no_other_machine_in_without_a_token(start, tmp_path):
    process, url = start("--host", "0.0.0.0", "--port", "0")
    assert (url, process.wait(60)) == ("", 2)
    (tmp_path / "token").write_text("short\n")
    with pytest.raises(ConfigError, match="16 ASCII characters"):
        _read_token(tmp_path / "token")
    (tmp_path / "token").write_text(json.dumps("a" * 30) + "\n")
    assert _read_token(tmp_path / "token") == json.dumps("a" * 30)
    with pytest.raises(ConfigError, match="cannot read"):
        _read_token(tmp_path / "nothing")
    assert [_is_loopback(name) for name in ("localhost", "127.0.0.1", "::1", "0.0.0.0", "a.example")] == [
        True,
        True,
        True,
        False,
        False,
    ]
