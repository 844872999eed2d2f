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


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "2")], ids=["here", "in two workers"])
def test_an_error_of_an_unknown_test_fails_the_run_and_is_shown(run_tests, workers):
    source = RING + "\nkept = [Ring()]\n\ndef test_it():\n    kept.clear()\n"
    run = run_tests(PLUGINS, *workers, test_it=source, test_other=source)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "2 passed" in run.output
    assert "an error of an unknown test fails the run" in run.output
    assert "ResourceWarning: unclosed <socket.socket" in run.output


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


HOLDS_MUCH = """
import builtins, gc, weakref, pytest

class Model:
    def __init__(self):
        self.weights, self.cycle = b"x" * (300 << 20), self

@pytest.fixture(scope="module")
def model():
    model = Model()
    builtins.last_model = weakref.ref(model)
    return model

def test_a_slow_collection(model):
    gc.freeze()
"""
IT_IS_GONE = """
import builtins

def test_it():
    assert builtins.last_model() is None
"""


def test_memory_that_is_held_in_a_cycle_goes_with_its_file_also_if_a_collection_was_slow(run_tests):
    run = run_tests(["late_errors"], test_a=HOLDS_MUCH, test_b=IT_IS_GONE)
    assert run.status == 0, run.output
