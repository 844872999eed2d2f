"""Child processes end in bounded time, with all that they have started, and with their parent."""

import os
import signal
import subprocess
import sys
import tempfile
import textwrap
from concurrent.futures import ThreadPoolExecutor

import pytest
from seer_host.process import ChildProcess, log_tail

from tests.support.descriptors import open_files
from tests.support.eventually import eventually
from tests.support.patience import PATIENCE_S
from tests.support.processes import alive

SLEEP = "import time; print('up', flush=True); time.sleep(600)"
WITH_CHILD = """
import subprocess
child = subprocess.Popen(["sleep", "600"])
print(child.pid, flush=True)
child.wait()
"""


@pytest.fixture
def start():
    children = []

    def start(code, **options):
        children.append(ChildProcess([sys.executable, "-c", textwrap.dedent(code)], **options))
        return children[-1]

    yield start
    for child in children:
        child.kill()
        child.end()


def test_a_child_that_ends_by_itself_has_a_status_and_a_reason(start):
    child = start("raise SystemExit(3)")
    assert child.wait(PATIENCE_S) == 3
    assert child.end(60) == child.reason() == "exited with status 3"


def test_a_child_within_its_grace_is_not_signalled(start):
    child = start("input()", pipes=True)
    child.stdin.write(b"\n")
    assert child.end(60) == "exited with status 0"


def test_a_child_that_runs_on_is_terminated_and_one_that_ignores_that_is_killed(start, monkeypatch):
    monkeypatch.setattr("seer_host.process.KILL_GRACE_S", 0.5)
    first = start(SLEEP, pipes=True)
    first.stdout.read(2)
    assert first.reason() == "still running"
    assert first.end() == "killed by SIGTERM"
    second = start("import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + SLEEP, pipes=True)
    second.stdout.read(2)
    assert second.end() == "killed by SIGKILL"
    assert second.end() == "killed by SIGKILL"


def test_a_child_that_has_ended_is_killed_no_more(start, monkeypatch):
    child = start("")
    child.end(PATIENCE_S)
    monkeypatch.setattr(os, "killpg", lambda *signalled: pytest.fail(f"{signalled} may be another's"))
    child.kill()


def test_threads_may_end_a_child_at_once(start):
    child = start(SLEEP)
    with ThreadPoolExecutor(8) as threads:
        reasons = set(threads.map(lambda _: child.end(), range(8)))
    assert reasons == {"killed by SIGTERM"}


def test_what_a_child_has_started_ends_with_it(start):
    child = start(WITH_CHILD, pipes=True)
    grandchild = int(child.stdout.read(100))
    os.kill(child.pid, signal.SIGKILL)
    assert child.wait(PATIENCE_S) == -signal.SIGKILL
    assert alive(grandchild)
    child.end()
    eventually(lambda: not alive(grandchild))


@pytest.mark.skipif(sys.platform != "linux", reason="the kernel of other systems sends no signal")
@pytest.mark.parametrize("how", ["", "import os; os.fork() or time.sleep(600)", "in_thread"])
def test_a_group_ends_with_the_process_that_started_it_killed(how):
    start = f"child = ChildProcess([sys.executable, '-c', {WITH_CHILD!r}], pipes=True)"
    if how == "in_thread":
        start = (
            f"thread = threading.Thread(target=lambda: globals().update(child=ChildProcess([sys.executable,"
            f" '-c', {WITH_CHILD!r}], pipes=True))); thread.start(); thread.join()"
        )
        how = ""
    code = f"""
import sys, threading, time
from seer_host.process import ChildProcess
{start}
print(child.pid, int(child.stdout.read(100)), flush=True)
{how}
time.sleep(600)
"""
    with subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        try:
            assert all(map(alive, pids))
            parent.kill()
            eventually(lambda: not any(map(alive, pids)))
        finally:
            os.killpg(parent.pid, signal.SIGKILL)


def test_a_command_that_is_missing_is_an_error_of_the_system_and_leaves_no_descriptor():
    before = open_files("pipe:", "null", "pidfd")
    with pytest.raises(FileNotFoundError):
        ChildProcess(["/no/such/command"])
    assert open_files("pipe:", "null", "pidfd") <= before


def test_the_tail_of_a_log_begins_where_it_is_asked_to(start):
    with tempfile.TemporaryFile() as log:
        log.write(b"earlier\n")
        log.flush()
        child = start("import sys; print('one'); sys.exit('two')", log=log)
        child.end(60)
        assert sorted(log_tail(log, 8)) == ["one", "two"]
        assert log_tail(log)[0] == "earlier"
        log.write(b"x" * 10_000)
        log.flush()
        assert log_tail(log, 8) == ["x" * 4096]
