"""A test that hangs fails with the stacks of all threads, and the tests after it run."""

import pytest

PLUGINS = ["time_limits"]
TIMEOUT = ("-p", "pytest_timeout")
IMPATIENT = "from tests.harness import time_limits\n\ntime_limits.GRACE_S = 0.5\n"
OTHER = """
def test_other():
    pass
"""
HANGS = """
import pytest, threading

def hang_in_a_thread():
    threading.Event().wait()

@pytest.mark.timeout(0.5)
def test_hangs():
    threading.Thread(target=hang_in_a_thread, daemon=True).start()
    threading.Event().wait()
"""
HANGS_IN_C = """
import pytest, signal, threading

@pytest.mark.timeout(0.5)
def test_hangs():
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGALRM])
    threading.Event().wait()
"""
HANGS_AFTER_A_FAILURE = """
import pytest, threading

@pytest.fixture
def never_ends():
    yield
    threading.Event().wait()

@pytest.mark.timeout(0.5)
def test_hangs(never_ends):
    raise AssertionError
"""


def test_a_test_that_hangs_fails_with_all_stacks_and_the_next_one_runs(run_tests):
    run = run_tests(PLUGINS, *TIMEOUT, test_it=HANGS + OTHER)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "1 failed, 1 passed" in run.output
    assert "hang_in_a_thread" in run.output
    assert "Failed: Timeout" in run.output


@pytest.mark.parametrize("source", [HANGS_IN_C, HANGS_AFTER_A_FAILURE], ids=["in C", "after a failure"])
def test_a_process_that_hangs_all_the_same_ends_with_all_stacks_and_is_replaced(run_tests, source):
    workers = ("-p", "xdist", "-n", "1")
    run = run_tests(PLUGINS, *TIMEOUT, *workers, conftest=IMPATIENT, test_it=source + OTHER)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "crashed while running 'test_it.py::test_hangs'" in run.output
    assert "Timeout (0:00:01)!" in run.output
    assert "1 passed" in run.output


def test_the_command_line_and_a_marker_have_the_last_word(run_tests):
    source = """
import pytest

def limit_of(request):
    return request.node.get_closest_marker("timeout").args[0]

@pytest.mark.timeout(60)
def test_marked(request):
    assert limit_of(request) == 60

@pytest.mark.long
def test_long(request):
    assert limit_of(request) == 1800

def test_plain(request):
    assert limit_of(request) == 300
"""
    marker = "markers=long"
    assert run_tests(PLUGINS, *TIMEOUT, "-o", marker, test_it=source).status == pytest.ExitCode.OK
    run = run_tests(
        PLUGINS, *TIMEOUT, "--timeout=0.1", test_it=HANGS.replace("@pytest.mark.timeout(0.5)\n", "")
    )
    assert "Timeout (>0.1s)" in run.output
