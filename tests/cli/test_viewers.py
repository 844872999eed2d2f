"""Connections to the ports of a run: however many there are, the run ends with the same results."""

import json
import re
import resource
import socket
import subprocess
import urllib.request
from contextlib import ExitStack, suppress

import pytest
from seer_host.ports import reserved_port

from tests.support.eventually import eventually

from .helpers import BOUND_S, lines_of

CONNECTIONS = 3000

HOLD = '''
"""An observer that holds the run at its first event until a byte comes; it may take all files meanwhile."""
import os
from msgspec import Struct
from seer_core.plugins.hookspecs import hookimpl


class Settings(Struct, frozen=True):
    held: str
    exhausts: bool = False


class Hold:
    def __init__(self, settings):
        self.settings, self.held = settings, False

    def observe(self, now, event, commands):
        if self.held:
            return
        self.held, taken = True, []
        while self.settings.exhausts:
            try:
                taken.append(os.open("/dev/null", os.O_RDONLY))
            except OSError:
                break
        os.mkdir(self.settings.held)  # which takes no file
        os.read(0, 1)
        for each in taken:
            os.close(each)


@hookimpl
def seer_make_observer(settings: Settings):
    return Hold(settings)
'''


@pytest.fixture
def many_files():
    """Let this process have its ends of thousands of connections open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def held(distribution, write_config, write_prompts, start_seer, seer, tmp_path):
    """Return a function that starts a run with both ports, and returns once it is held.

    It returns the process, the address of the dashboard, the port of the figures, and a function that lets
    the run go on and returns its results and its standard error.  Beside it comes a function that returns the
    results of the same run without ports.
    """
    distribution("hold", HOLD)
    with ExitStack() as stack:

        def start(*, files, exhausts=False):
            port = stack.enter_context(reserved_port())
            more = f'[plugin.hold]\nheld = "{tmp_path}/held"\nexhausts = {json.dumps(exhausts)}\n'
            config = write_config(
                ["divided_rollout", "prometheus", "hold"],
                f"[rollout]\nn = 4\nmax_tokens = 64\n[plugin.prometheus]\nport = {port}\n{more}",
            )
            prompts = write_prompts(*({"prompt": each, "group_id": each} for each in "abcdef"))
            process = start_seer(
                *("run", config, "--prompts", prompts, "--out", tmp_path / "out", "--dashboard"),
                stdin=subprocess.PIPE,
                preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_NOFILE, files),
            )
            line = ""
            while not (found := re.search(r"dashboard: (http\S+)", line)):
                assert process.poll() is None
                line = process.stderr.readline()
            eventually(lambda: process.poll() is not None or (tmp_path / "held").exists())
            assert process.poll() is None, process.stderr.read()

            def finish():
                _, errors = process.communicate("\n", timeout=BOUND_S)
                assert process.returncode == 0, errors
                return responses_of(tmp_path / "out"), errors

            return process, found[1], port, finish

        def alone():
            command = ("run", tmp_path / "seer.toml", "--prompts", tmp_path / "prompts.jsonl")
            result = seer(*command, "--out", tmp_path / "alone", "-p", "no:prometheus", "-p", "no:hold")
            assert result.exit_code == 0, result.output
            return responses_of(tmp_path / "alone")

        yield start, alone


def responses_of(out):
    """Return what a run has written of each response, and how it has ended."""
    responses = {each["request_id"]: each["token_ids"] for each in lines_of(out / "completions.jsonl")}
    return responses, json.loads((out / "summary.json").read_text())["ended"]


def ask(address, timeout=BOUND_S):
    with urllib.request.urlopen(address, timeout=timeout) as answer:
        return answer.read()


@pytest.mark.usefixtures("many_files")
@pytest.mark.parametrize("target", ["dashboard", "figures"])
def test_thousands_of_slow_connections_change_nothing_of_a_run(held, target):
    start, alone = held
    process, page, figures, finish = start(files=(256, 1024))
    port = figures if target == "figures" else int(re.search(r":(\d+)/", page)[1])
    with ExitStack() as slow:
        opened = []
        for number in range(CONNECTIONS):
            opened.append(slow.enter_context(socket.create_connection(("127.0.0.1", port), BOUND_S)))
            with suppress(ConnectionError):
                opened[-1].sendall(b"GET /metrics HTTP/1.1\r\nX-Slow: "[: 1 + number % 30])
        for each in opened:  # a byte now and then
            with suppress(ConnectionError):
                each.sendall(b"x")
        assert b"<title>" in ask(page)
        assert b"seer_groups_total" in ask(f"http://127.0.0.1:{figures}/metrics")
        assert resource.prlimit(process.pid, resource.RLIMIT_NOFILE) == (1024, 1024)
        results, errors = finish()
    assert len(results[0]) == 24
    assert results == alone()
    assert "Traceback" not in errors


def test_a_run_without_a_file_left_is_held_up_by_no_viewer_and_answers_later(held):
    start, alone = held
    _, page, figures, finish = start(files=(128, 128), exhausts=True)
    with ExitStack() as waiting:
        for port in (figures, int(re.search(r":(\d+)/", page)[1])):
            for _ in range(100):
                viewer = waiting.enter_context(socket.create_connection(("127.0.0.1", port), BOUND_S))
                viewer.sendall(b"GET / HTTP/1.1\r\n\r\n")
        results, errors = finish()
    assert results == alone()
    assert "Traceback" not in errors
