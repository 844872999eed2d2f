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


def test_many_failed_tests_do_not_run_again(run_tests):
    run = run_tests(BOTH, "--second-run", test_it=flaky(6))
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert run.lines[-1] == "6 tests have failed, and none of more than 5 runs again"


def test_without_the_option_a_failure_is_final(run_tests):
    run = run_tests(BOTH, test_it=flaky(1))
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "flaky:" not in run.output


def test_a_refused_skip_fails_a_run_whose_failed_test_is_flaky(run_tests):
    skipped = "import pytest\n\ndef test_skipped():\n    pytest.skip('no whale here')\n"
    run = run_tests(BOTH, "--second-run", test_it=flaky(1), test_other=skipped)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "skipped tests are failures" in run.output
    assert run.lines[-1] == "flaky: test_it.py::test_lucky[flaky-0]"


def test_a_test_that_is_skipped_the_second_time_has_failed(run_tests):
    source = flaky(1).replace(
        "    if not", "    if marks.exists():\n        pytest.skip('shared/data')\n    if not"
    )
    run = run_tests(BOTH, "--second-run", test_it=source)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert run.lines[-1] == "failed again: test_it.py::test_lucky[flaky-0]"


@pytest.mark.parametrize("workers", [(), ("-p", "xdist", "-n", "1")], ids=["here", "in a worker"])
def test_a_file_that_cannot_be_imported_is_final(run_tests, workers):
    options = ("--second-run", "--continue-on-collection-errors", *workers)
    run = run_tests(BOTH, *options, test_it=flaky(1), test_other="import whale\n")
    assert run.status != pytest.ExitCode.OK
    assert "flaky:" not in run.output


def test_the_death_of_a_worker_is_final(run_tests):
    dies = "import os\n\ndef test_dies():\n    os._exit(1)\n"
    run = run_tests(BOTH, "--second-run", "-p", "xdist", "-n", "1", test_it=dies + PASSES)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert re.search("crashed while running 'test_it.py::test_dies'", run.output)
    assert "second run, one by one" not in run.output


@pytest.mark.parametrize("end", ["raise KeyboardInterrupt", "pytest.exit('enough')"])
def test_a_run_that_was_interrupted_is_not_judged_anew(run_tests, end):
    run = run_tests(BOTH, "--second-run", test_it=flaky(1) + f"\ndef test_end():\n    {end}\n")
    assert run.status == pytest.ExitCode.INTERRUPTED
    assert "flaky:" not in run.output


def test_a_run_that_stops_at_its_first_failure_is_final(run_tests):
    run = run_tests(BOTH, "--second-run", "-x", test_it=flaky(1) + PASSES)
    assert run.status == pytest.ExitCode.TESTS_FAILED
    assert "flaky:" not in run.output
