"""A master of ours is started again when it dies, and ends with the pool or the runtime; by a stand-in."""

import subprocess
import sys

import psutil
import pytest
import structlog
from seer_mooncake import master as master_module
from seer_mooncake.master import Master

from tests.support.eventually import eventually
from tests.support.patience import PATIENCE_S

pytestmark = pytest.mark.no_mooncake

STANDIN = f"""#!{sys.executable}
import sys
from http.server import BaseHTTPRequestHandler, HTTPServer

class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        body = b'"service_ready":true' if self.path == "/health" else b"# help\\nmaster_allocated_bytes 7\\n"
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

port = next(each.split("=")[1] for each in sys.argv if each.startswith("--metrics_port="))
HTTPServer(("127.0.0.1", int(port)), Handler).serve_forever()
"""


@pytest.fixture
def binary(tmp_path):
    path = tmp_path / "standin"
    path.write_text(STANDIN)
    path.chmod(0o700)
    return path


@pytest.fixture
def master(binary, tmp_path, monkeypatch):
    monkeypatch.setattr(master_module, "RESTART_PAUSE_S", 0.0)
    one = Master()
    assert one.start(binary, tmp_path / "root" / "seer-mooncake-run", 60.0)
    yield one
    one.stop()


def test_it_answers_and_stopping_it_leaves_no_process_and_no_directory(master, tmp_path, descendants):
    assert master.stats() == {"master_allocated_bytes": 7.0}
    mine = [process for process, arguments in descendants() if "standin" in " ".join(arguments)]
    assert len(mine) == 1
    master.stop()
    assert not mine[0].is_running()
    assert list((tmp_path / "root").iterdir()) == []
    master.stop()


def test_it_is_started_again_when_it_dies_and_given_up_in_the_end(master, monkeypatch):
    with structlog.testing.capture_logs() as logs:
        for _ in range(master_module.RESTARTS + 1):
            eventually(lambda: master.stats() != {})
            master._process.kill()
            eventually(lambda: master.stats() == {} or len(logs) > 0)
        eventually(lambda: logs[-1]["event"] == "kv_pool_master_not_kept")
    events = [each["event"] for each in logs]
    assert events.count("kv_pool_master_restarted") == master_module.RESTARTS
    assert {each["reason"] for each in logs if each["event"] == "kv_pool_master_ended"} == {
        "killed by SIGKILL"
    }


def test_one_that_can_be_run_no_more_is_given_up_in_the_end(master, binary):
    with structlog.testing.capture_logs() as logs:
        binary.unlink()
        master._process.kill()
        eventually(lambda: [each["event"] for each in logs[-1:]] == ["kv_pool_master_not_kept"])
    reasons = [each["reason"] for each in logs if each["event"] == "kv_pool_master_ended"]
    assert reasons[0] == "killed by SIGKILL"
    assert reasons[1:] == ["cannot be started: No such file or directory"] * master_module.RESTARTS


def test_figures_that_are_cut_off_count_for_nothing(monkeypatch):
    master = Master()
    master._metrics_port = 1
    for text in (
        "master_allocated_bytes 7\nmaster_evic",
        "master_allocated_bytes 7\nmaster_allocated_bytes ",
    ):
        monkeypatch.setattr(master_module, "_get", lambda *place, text=text: text)
        assert master.stats() == {}


def test_one_that_cannot_be_run_does_not_answer(tmp_path):
    assert not Master().start(tmp_path / "missing", None, 60.0)


def test_it_and_its_directory_go_with_a_runtime_that_was_killed(binary, tmp_path):
    directory = tmp_path / "root" / "seer-mooncake-run"
    script = f"""
import pathlib, time
from seer_mooncake.master import Master
assert Master().start(pathlib.Path({str(binary)!r}), pathlib.Path({str(directory)!r}), 60.0)
print("ready", flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as runtime:
        assert runtime.stdout.readline() == "ready\n"
        children = psutil.Process(runtime.pid).children(recursive=True)
        assert len(children) == 2
        assert directory.is_dir()
        runtime.kill()
    psutil.wait_procs(children, PATIENCE_S)
    assert not any(each.is_running() and each.status() != psutil.STATUS_ZOMBIE for each in children)
    assert list(directory.parent.iterdir()) == []
