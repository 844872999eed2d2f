"""A run that is ended by SIGTERM says what has failed and what it waited for."""

import re
import signal

ENDS = """
import os, signal
import pytest

@pytest.hookimpl(trylast=True)
def pytest_runtest_logstart(nodeid):
    if "test_waits" in nodeid and "PYTEST_XDIST_WORKER" not in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
"""
TESTS = """
import os, threading

def test_passes(): pass
def test_fails(): assert 0
def test_dies(): os._exit(1)
def test_waits(): threading.Event().wait(60)
"""


def test_failures_and_running_tests_are_named(run_tests):
    run = run_tests(["ended_early"], "-p", "xdist", "-n", "1", conftest=ENDS, test_it=TESTS)
    assert run.status == -signal.SIGTERM
    said = run.output.partition("ended by SIGTERM")[2]
    assert re.fullmatch(
        r" after \d+\.\d minutes: 1 passed\n"
        r"failed after \d+ s: test_it\.py::test_fails\n"
        r"failed after \d+ s: test_it\.py::test_dies\n"
        r"running for \d+ s: test_it\.py::test_waits\n",
        said,
    )
