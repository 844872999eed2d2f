"""A run that is ended by SIGTERM, or by its limit, says what has failed and what it waited for."""

import re
import signal

import pytest

from tests.harness.ended_early import GATE_S

ENDS = """
import os, signal
import pytest

class Ends:
    @pytest.hookimpl(trylast=True)
    def pytest_runtest_logstart(self, nodeid):
        if "test_waits" in nodeid:
            os.kill(os.getpid(), signal.{})

def pytest_configure(config):
    if not hasattr(config, "workerinput"):
        config.pluginmanager.register(Ends())
"""
TESTS = """
import os, threading

def test_passes(): pass
def test_fails(): assert 0
def test_dies(): os._exit(1)
def test_waits(): threading.Event().wait(60)
"""


@pytest.mark.parametrize("name", ["SIGTERM", "SIGALRM"])
def test_failures_and_running_tests_are_named(run_tests, name):
    run = run_tests(["ended_early"], "-p", "xdist", "-n", "1", conftest=ENDS.format(name), test_it=TESTS)
    assert run.status == -signal.Signals[name]
    said = run.output.partition(f"ended by {name}")[2]
    assert re.fullmatch(
        r" after \d+\.\d minutes: 1 passed\n"
        r"failed after \d+ s: test_it\.py::test_fails\n"
        r"failed after \d+ s: test_it\.py::test_dies\n"
        r"running for \d+ s: test_it\.py::test_waits\n",
        said,
    )


def test_the_gate_has_a_limit(run_tests):
    limit = """
import signal

def pytest_sessionstart(session):
    print("a limit of", signal.alarm(0), "s")

def pytest_addoption(parser):
    parser.addoption("--gate", action="store_true")
"""
    for options, seconds in ((["--gate"], GATE_S), ([], 0)):
        run = run_tests(
            ["ended_early"],
            "-p",
            "xdist",
            "-n",
            "1",
            "-s",
            *options,
            conftest=limit,
            test_it="def test_it(): pass",
        )
        assert f"a limit of {seconds} s" in run.output
