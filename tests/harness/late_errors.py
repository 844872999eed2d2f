"""Errors that nothing could catch, as of sockets that are not closed, fail the test that made them.

pytest reports such an error with the test during which it came up.  An object in a cycle is destroyed when
the garbage collector next runs, and a fixture's value after the test's last phase, so that was often another
test.  Here garbage is collected after each test, in the same step, while its own warning filters hold.
Objects from before the first test are left out, and later those that made a collection slow; without
them it takes a few milliseconds.  Errors about these appear at the end of the run, which they fail.  What
is left out stays in memory if it is in a cycle, so everything is collected behind a file that has cost much
memory, and what has been freed goes back to the system.
"""

import ctypes
import gc
import os
import sys
import traceback
from pathlib import Path
from time import thread_time

import pytest
from _pytest.threadexception import collect_thread_exception
from _pytest.unraisableexception import collect_unraisable

from tests.harness import verdict

SLOW_S = 0.005
"""A collection that computes for longer leaves out what it has found in use from then on."""

MUCH_BYTES = 256 << 20
"""What the process may grow until everything is collected at the end of a file, which takes a second."""

KEPT_BY_PYTEST = ("last_exc", "last_type", "last_value", "last_traceback")
"""The names in ``sys`` under which a failure's frames outlive it, until the next test is called."""

_FAILED = pytest.StashKey[bool]()
_ERRORS = pytest.StashKey[list[str]]()
_RESIDENT = pytest.StashKey[int]()


def pytest_configure(config):
    """Begin with no errors."""
    config.stash[_ERRORS] = []


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Leave out what the import of test files has made."""
    _note(session.config, "while tests were collected")
    gc.freeze()
    session.config.stash[_RESIDENT] = resident_bytes()


def pytest_exception_interact(node):
    """Note a test that has failed: what it has left open has no errors of its own."""
    node.stash[_FAILED] = True


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item, nextitem):
    """Report errors that come up when nothing of a test is left, as errors of its teardown."""
    result = yield
    failed = item.stash.get(_FAILED, False)
    if failed:
        for name in KEPT_BY_PYTEST:
            vars(sys).pop(name, None)
    begun_s = thread_time()
    call = pytest.CallInfo.from_call(lambda: _collect(item.config), when="teardown")
    if thread_time() - begun_s > SLOW_S:
        gc.freeze()
    if call.excinfo is not None and not failed:
        report = item.ihook.pytest_runtest_makereport(item=item, call=call)
        item.ihook.pytest_runtest_logreport(report=report)
    if nextitem is not None and nextitem.path != item.path:
        _collect_all_if_much(item.config, item.path.name)
    return result


def _collect_all_if_much(config, name):
    if resident_bytes() - config.stash[_RESIDENT] > MUCH_BYTES:
        gc.unfreeze()
        _note(config, f"after the tests of {name}")
        gc.freeze()
        return_freed_memory()
        config.stash[_RESIDENT] = resident_bytes()


def return_freed_memory():
    """Return to the system what glibc keeps for the next time, in each thread's arena."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # other C libraries have none
    if trim is not None:
        trim(0)


def resident_bytes():
    """Return what the system says that this process holds."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")


@pytest.hookimpl(tryfirst=True)
def pytest_sessionfinish(session):
    """Collect everything, also in each worker of xdist, and fail the run if that has made errors."""
    config = session.config
    gc.unfreeze()
    _note(
        config,
        f"after the last test of {config.workerinput['workerid']}"
        if _is_worker(config)
        else "after the last test",
    )
    if _is_worker(config):
        config.workeroutput["late_errors"] = config.stash[_ERRORS]
    elif config.stash[_ERRORS]:
        verdict.fail(session)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node):
    """Receive the errors of a worker."""
    node.config.stash[_ERRORS] += getattr(node, "workeroutput", {}).get("late_errors", [])


def pytest_terminal_summary(terminalreporter, config):
    """Show the errors whose test is unknown."""
    for error in config.stash[_ERRORS]:
        terminalreporter.section("an error of an unknown test fails the run", red=True)
        terminalreporter.line(error)


def _is_worker(config):
    return hasattr(config, "workerinput")


def _note(config, when):
    try:
        _collect(config)
    except Exception as error:
        config.stash[_ERRORS].append(f"{when}:\n{''.join(traceback.format_exception(error))}")


def _collect(config):
    gc.collect()
    collect_unraisable(config)
    collect_thread_exception(config)
