"""A skipped test fails the run, except for the reasons listed here."""

import os
import re

from tests.harness import verdict

ALLOWED_SKIPS = {
    r"no C\+\+ compiler|cannot link AddressSanitizer": "fuzzing in C++ needs sanitizers",
    r"vLLM is not built for CPU": "the kernel under test is that of CPUs",
    r"machines are made of namespaces": "only root may make networks; clusters of raylets are tested anyway",
    r"no Prometheus here": "make prometheus brings it only from Debian's packages",
    r"no OpenEnv here": "make setup-environments brings it into an environment of its own",
    r"shared/data": "recorded lengths and texts are not part of the project",
}
"""Why a test may be skipped, by a pattern of its reason.  In CI, whose machine is known, none may."""

_refused: list[str] = []


def pytest_runtest_logreport(report):
    """Note a skipped test that is not allowed to be."""
    if report.skipped and not hasattr(report, "wasxfail"):
        _judge(report)


def pytest_collectreport(report):
    """Note a skipped file that is not allowed to be."""
    if report.skipped:
        _judge(report)


def _judge(report):
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    allowed = () if os.environ.get("CI") else ALLOWED_SKIPS
    if not any(re.search(pattern, reason) for pattern in allowed):
        _refused.append(report.nodeid)


def pytest_sessionfinish(session):
    """Fail a run that would otherwise have passed without some of its tests."""
    if _refused:
        verdict.fail(session)


def pytest_terminal_summary(terminalreporter):
    """Say why a run without failures failed."""
    if _refused:
        terminalreporter.section("skipped tests are failures", red=True)
        terminalreporter.line(
            f"{len(_refused)} tests were skipped for want of something that the set-up should have brought;"
            " their reasons stand above, allowed ones in ALLOWED_SKIPS of tests/harness/skips.py"
        )
