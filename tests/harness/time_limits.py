"""How long a test may take.

pytest-timeout fails a test that takes longer, with the stacks of all threads, and the run goes on.  Where
that is of no use, because the test hangs in C or hangs again while it is torn down, the process ends a
little later with the stacks of all threads; xdist replaces such a process and reports its test as failed.
"""

import faulthandler
import os

import pytest

LIMIT_S = 300.0
"""Seconds for a test and the fixtures made for it: several times what most take on two busy cores."""

LIMITS_S = {
    "tests/test_gpu_check.py": 1200.0,
    "tests/test_packages.py": 900.0,
    "backends/vllm/tests/test_vllm_second_runner.py": 1200.0,
    "tests/soak/": 1200.0,
    "backends/": 600.0,
    "tests/integration/": 600.0,
    "training/": 600.0,
}
"""Limits of files whose tests take longer.  A test of its own kind has the marker ``timeout``."""

MARKED_LIMITS_S = {"engine": 600.0, "long": 1800.0}
"""Of tests with these markers, at least."""

CAMPAIGN_SHARE = 1.5
"""How much longer than asked for a campaign may take, which ends with what it has begun."""

GRACE_S = 120.0
"""Seconds after which the process ends, if the test then still hangs."""

_STDERR = pytest.StashKey[int]()


def pytest_configure(config):
    """Keep the real standard error: stacks go there while the output of a test is captured."""
    config.stash[_STDERR] = os.dup(2)


def pytest_unconfigure(config):
    """Close it again."""
    if _STDERR in config.stash:
        os.close(config.stash[_STDERR])
        del config.stash[_STDERR]


def limit_of(item):
    """Return the seconds that a test may take, 0 for any number."""
    option = item.config.getoption("timeout", None)
    if option is not None:
        return option
    marker = item.get_closest_marker("timeout")
    if marker is not None:
        return marker.args[0] if marker.args else marker.kwargs["timeout"]
    limit_s = next((limit_s for start, limit_s in LIMITS_S.items() if item.nodeid.startswith(start)), LIMIT_S)
    marked = (limit for name, limit in MARKED_LIMITS_S.items() if item.get_closest_marker(name))
    limit_s = max([limit_s, *marked])
    minutes, seconds = item.config.getoption("--soak-minutes", 0), item.config.getoption("--fuzz-seconds", 0)
    return limit_s + CAMPAIGN_SHARE * (60 * minutes + seconds)


def pytest_collection_modifyitems(config, items):
    """Give each test the marker of its limit, unless the command line or the test has another one."""
    if getattr(config.option, "timeout", 0) is None:  # pytest-timeout is there
        for item in items:
            if item.get_closest_marker("timeout") is None:
                item.add_marker(pytest.mark.timeout(limit_of(item)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """End the process if a test still runs when its limit has passed without effect."""
    _arm(item, limit_of(item))
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_teardown(item):
    """Begin again for the teardown: pytest takes a failed test for one that is being debugged."""
    _arm(item, limit_of(item))
    return (yield)


def _arm(item, limit_s):
    if limit_s:
        file = item.config.stash[_STDERR]
        faulthandler.dump_traceback_later(limit_s + GRACE_S, file=file, exit=True)
