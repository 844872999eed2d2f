"""An error that nothing could catch fails the test that made it, and in any case the run."""

import pytest

PLUGINS = ("late_errors", "second_runs", "skips")
RING = """
import socket

class Ring:
    def __init__(self):
        self.ring = self
        self.socket = socket.socket()
"""


def test_garbage_in_a_cycle_fails_the_test_that_made_it(run_tests):
    source = RING + "\ndef test_leaks():\n    Ring()\n\ndef test_innocent():\n    pass\n"
    run = run_tests(PLUGINS, test_it=source)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "ERROR at teardown of test_leaks" in run.output
    assert "ResourceWarning: unclosed <socket.socket" in run.output
    assert "2 passed, 1 error" in run.output


def test_a_failed_test_s_garbage_is_no_error_of_its_own_nor_of_the_next_test(run_tests):
    source = (
        RING
        + """
def test_fails():
    ring = Ring()
    assert ring is None

def test_innocent():
    pass
"""
    )
    run = run_tests(PLUGINS, test_it=source)
    assert "1 failed, 1 passed in" in run.output


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["here", "in a worker"])
def test_a_value_of_a_fixture_that_is_not_closed_fails_its_test(run_tests, workers):
    source = """
import pytest, socket

@pytest.fixture
def unclosed():
    return socket.socket()

def test_leaks(unclosed):
    pass

def test_innocent():
    pass
"""
    run = run_tests(PLUGINS, *workers, test_it=source)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "ERROR at teardown of test_leaks" in run.output
    assert "2 passed, 1 error" in run.output


def test_the_test_s_own_filters_hold_for_its_garbage(run_tests):
    ignores = "\nimport pytest\n\n@pytest.mark.filterwarnings('ignore::ResourceWarning')\n"
    run = run_tests(PLUGINS, test_it=RING + ignores + "def test_leaks():\n    Ring()\n")
    assert run.status == pytest.ExitCode.OK


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["here", "in two workers"])
def test_an_error_of_an_unknown_test_fails_the_run_and_is_shown(run_tests, workers):
    source = RING + "\nkept = [Ring()]\n\ndef test_it():\n    kept.clear()\n"
    run = run_tests(PLUGINS, *workers, test_it=source, test_other=source)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "2 passed" in run.output
    assert "an error of an unknown test fails the run" in run.output
    assert "ResourceWarning: unclosed <socket.socket" in run.output


def test_it_fails_a_run_whose_failed_test_is_flaky(run_tests):
    source = (
        RING
        + """
from pathlib import Path

kept = [Ring()]

def test_it():
    kept.clear()
    assert Path("mark").exists() or Path("mark").touch()
"""
    )
    run = run_tests(PLUGINS, "--second-run", test_it=source.replace("kept.clear()", "kept and kept.pop()"))
    assert run.status == pytest.ExitCode.TESTS_FAILED


def test_an_error_of_an_import_is_shown_as_of_the_collection(run_tests):
    run = run_tests(PLUGINS, test_it=RING + "\nRing()\n\ndef test_it():\n    pass\n")
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "while tests were collected:" in run.output


def test_an_error_in_a_thread_that_outlives_its_test_s_phases_fails_the_test(run_tests):
    source = """
import pytest, threading

@pytest.fixture
def thread():
    thread = threading.Thread(target=lambda: 1 / 0)
    yield thread
    thread.start()
    thread.join()

def test_it(thread):
    pass
"""
    run = run_tests(PLUGINS, test_it=source)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "ERROR at teardown of test_it" in run.output
