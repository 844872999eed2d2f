"""With ``--second-run`` a failed test runs once more, alone in a process, when all others have ended.

One that passes then is flaky.  Up to two flaky tests do not fail the run; its last lines name them.  The
report of the first failure is shown in any case.  pytest-rerunfailures runs a test again where it failed: in
the same process, and with the load of the other tests beside it.
"""

import re
import subprocess
import sys

import pytest

from tests.harness import verdict

MOST_FAILED = 5
"""If more have failed, none runs again: the cause is another one than luck."""

MOST_FLAKY = 2
"""If more pass in their second runs, the run fails nevertheless."""


def pytest_addoption(parser):
    """Add the option."""
    parser.getgroup("second run").addoption(
        "--second-run",
        action="store_true",
        help=f"run up to {MOST_FAILED} failed tests again, alone; the run passes if {MOST_FLAKY} or fewer"
        " have failed, and pass now",
    )


def pytest_configure(config):
    """Watch the failures, in the process that reports them."""
    if config.getoption("--second-run") and not hasattr(config, "workerinput"):
        config.pluginmanager.register(SecondRuns(), "second_runs")


class SecondRuns:
    """The tests that have failed, and whether all failures are of a kind that may be luck."""

    def __init__(self):
        self._failed = {}
        self._hopeless = False

    def pytest_runtest_logreport(self, report):
        """Note a failed test.  The end of a process, which xdist reports without a phase, is never luck."""
        if report.failed:
            self._failed[report.nodeid] = None
            self._hopeless |= report.when not in ("setup", "call", "teardown")

    def pytest_collectreport(self, report):
        """Note that a file could not be imported, whose tests are missing."""
        self._hopeless |= report.failed

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_sessionfinish(self, session):
        """Run the failed tests again when everything is reported, and judge anew."""
        result = yield
        # Interrupts have another status; with --maxfail or --exitfirst there are tests that have not run.
        ended = session.exitstatus == pytest.ExitCode.TESTS_FAILED and not (
            session.shouldfail or session.shouldstop
        )
        if self._failed and ended and not self._hopeless:
            self._run_again(session)
        return result

    def _run_again(self, session):
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        if len(self._failed) > MOST_FAILED:
            reporter.write_line(
                f"{len(self._failed)} tests have failed, and none of more than {MOST_FAILED} runs again"
            )
            return
        reporter.write_line(f"a second run, one by one, of {len(self._failed)} tests that have failed")
        passed = {nodeid: _passes(session.config, nodeid) for nodeid in self._failed}
        for nodeid, is_flaky in passed.items():
            reporter.write_line(
                f"{'flaky' if is_flaky else 'failed again'}: {nodeid}", yellow=is_flaky, red=not is_flaky
            )
        if all(passed.values()):
            if len(passed) > MOST_FLAKY:
                reporter.write_line(f"more than {MOST_FLAKY} flaky tests fail the run", red=True)
            elif not verdict.is_failed(session):
                session.exitstatus = pytest.ExitCode.OK


def _passes(config, nodeid):
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *_options(config), nodeid]
    ended = subprocess.run(command, cwd=config.rootpath, capture_output=True, text=True, errors="replace")
    # Not one that is skipped now.
    return ended.returncode == pytest.ExitCode.OK and re.search(r"\b1 passed\b", ended.stdout) is not None


def _options(config):
    yield f"--rootdir={config.rootpath}"
    if config.inipath is not None:
        yield from ("-c", str(config.inipath))
    if config.getoption("--long", False):
        yield "--long"
