"""The last words of a run that is ended from outside, or by the limit of the gate.

pytest sums up a run that comes to its end or is interrupted.  One that gets SIGTERM would go without a word
about its failures and about the tests that it waited for.  CI ends its runs so, hence the gate has a limit of
its own, before that: three tests that hang may take an hour.
"""

import os
import signal
import time

GATE_S = 4500
"""Seconds of the gate, of which CI allows 5,400 with environments."""

MOST_NAMED = 8
"""Lines for tests that have failed, so that what CI shows of a run's end has all."""


def pytest_configure(config):
    """Watch the tests where xdist runs them in other processes: their children would have this handler."""
    if config.getoption("dist", "no") != "no" and not hasattr(config, "workerinput"):
        limit_s = GATE_S if config.getoption("gate", False) else 0
        config.pluginmanager.register(EndedEarly(limit_s), "ended_early")


class EndedEarly:
    """The tests that run and those that have failed, for a last word when SIGTERM comes or the limit."""

    def __init__(self, limit_s):
        self._begun_s = time.monotonic()
        self._running = {}
        self._failed = {}
        self._passed = 0
        self._before = {each: signal.signal(each, self._end) for each in (signal.SIGTERM, signal.SIGALRM)}
        signal.alarm(limit_s)

    def pytest_unconfigure(self):
        """Give the signals their former handlers again."""
        signal.alarm(0)
        for number, handler in self._before.items():
            signal.signal(number, handler)

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
        by = signal.Signals(number).name
        os.write(2, "".join(f"{line}\n" for line in self._lines(by)).encode(errors="replace"))
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _lines(self, by):
        now_s = time.monotonic()
        yield f"\nended by {by} after {(now_s - self._begun_s) / 60:.1f} minutes: {self._passed} passed"
        for nodeid, seconds in list(self._failed.items())[-MOST_NAMED:]:
            yield f"failed after {seconds:.0f} s: {nodeid}"
        if len(self._failed) > MOST_NAMED:
            yield f"and {len(self._failed) - MOST_NAMED} failed before these"
        for nodeid, begun_s in self._running.items():
            yield f"running for {now_s - begun_s:.0f} s: {nodeid}"
