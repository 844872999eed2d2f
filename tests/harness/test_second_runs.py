"""A second run changes the verdict on a test that fails by bad luck, and on nothing else."""

import re

import pytest

from tests.harness import second_runs

FLAKY = """
import pytest
from pathlib import Path

@pytest.mark.parametrize("name", {names})
def test_lucky(name):
    marks = Path(__file__).with_name(f"{{name}}.mark")
    if not marks.exists():
        marks.touch()
        raise AssertionError(f"the first failure of {{name}}")
"""
FAILS = "def test_fails():\n    assert 1 == 2\n"
PASSES = "def test_passes():\n    pass\n"
BOTH = ("second_runs", "skips")


def flaky(count):
    return FLAKY.format(names=[f"flaky-{number}" for number in range(count)])


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["here", "in a worker"])
def test_two_flaky_tests_are_named_at_the_end_and_do_not_fail_the_run(run_tests, workers):
    run = run_tests(BOTH, "--second-run", *workers, test_it=flaky(2) + PASSES)
    assert run.status == pytest.ExitCode.OK
    assert "the first failure of flaky-1" in run.output
    assert run.lines[-3:] == [
        "a second run, one by one, of 2 tests that have failed",
        "flaky: test_it.py::test_lucky[flaky-0]",
        "flaky: test_it.py::test_lucky[flaky-1]",
    ]


def test_more_flaky_tests_fail_the_run(run_tests):
    run = run_tests(BOTH, "--second-run", test_it=flaky(3))
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert run.lines[-1] == f"more than {second_runs.MOST_FLAKY} flaky tests fail the run"


def test_a_test_that_fails_twice_fails_the_run(run_tests):
    run = run_tests(BOTH, "--second-run", test_it=flaky(1) + FAILS)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert run.lines[-2:] == [
        "flaky: test_it.py::test_lucky[flaky-0]",
        "failed again: test_it.py::test_fails",
    ]


def test_the_death_of_a_worker_is_final(run_tests):
    dies = "import os\n\ndef test_dies():\n    os._exit(1)\n"
    run = run_tests(BOTH, "--second-run", "-p", "xdist", "-n", "1", test_it=dies + PASSES)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert re.search("crashed while running 'test_it.py::test_dies'", run.output)
    assert "second run, one by one" not in run.output
