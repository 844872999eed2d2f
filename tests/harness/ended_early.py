"""The last words of a run that is ended from outside, by CI's limit for instance.

pytest sums up a run that comes to its end or is interrupted.  One that gets SIGTERM would go without a word
about its failures and about the tests that it waited for.
"""

import os
import signal
import time

MOST_NAMED = 8
"""Lines for tests that have failed, so that what CI shows of a run's end has all."""


def pytest_configure(config):
    """Watch the tests where xdist runs them in other processes: their children would have this handler."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        config.pluginmanager.register(EndedEarly(), "ended_early")


class EndedEarly:
    """The tests that run and those that have failed, for a last word when SIGTERM comes."""

    def __init__(self):
        self._begun_s = time.monotonic()
        self._running = {}
        self._failed = {}
        self._passed = 0
        self._before = signal.signal(signal.SIGTERM, self._end)

    def pytest_unconfigure(self):
        """Give SIGTERM its former handler again."""
        signal.signal(signal.SIGTERM, self._before)

    def pytest_runtest_logstart(self, nodeid):
        """Note that a test begins, here or in a process of xdist's."""
        self._running[nodeid] = time.monotonic()

    def pytest_runtest_logfinish(self, nodeid):
        """Note that a test has ended."""
        self._running.pop(nodeid, None)

    def pytest_runtest_logreport(self, report):
        """Count what passed, and note what failed; a process that ended was running its test until then."""
        self._passed += report.passed and report.when == "call"
        if report.failed:
            begun_s = self._running.get(report.nodeid, time.monotonic())
            self._failed[report.nodeid] = time.monotonic() - begun_s
            if report.when not in ("setup", "call", "teardown"):
                self._running.pop(report.nodeid, None)

    def _end(self, number, frame):
        os.write(2, "".join(f"{line}\n" for line in self._lines()).encode(errors="replace"))
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _lines(self):
        now_s = time.monotonic()
        yield f"\nended by SIGTERM after {(now_s - self._begun_s) / 60:.1f} minutes: {self._passed} passed"
        for nodeid, seconds in list(self._failed.items())[-MOST_NAMED:]:
            yield f"failed after {seconds:.0f} s: {nodeid}"
        if len(self._failed) > MOST_NAMED:
            yield f"and {len(self._failed) - MOST_NAMED} failed before these"
        for nodeid, begun_s in self._running.items():
            yield f"running for {now_s - begun_s:.0f} s: {nodeid}"
