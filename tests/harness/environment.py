"""Processes of a run share their variables, and import little while they read test files.

Variables that tests have set, or a library as a test imported it, last no longer than the file.

A fork server serves the engines that have its variables.  If those changed in the midst of a run, each engine
would be imported once more, which takes ten seconds.  So it does in each process of a run if a test file
imports it at its head instead of in a fixture.
"""

import os
import sys

import pytest

HEAVY = ("mlflow", "sglang", "trl", "vllm")
IMPORTED = pytest.StashKey[set[str]]()
"""Those of them that were imported while tests were collected."""

_VARIABLES = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Keep what the run was started with, and what files of fixtures have set and imported."""
    session.config.stash[_VARIABLES] = dict(os.environ)
    session.config.stash[IMPORTED] = sys.modules.keys() & HEAVY


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item, nextitem):
    """Restore it behind the last test of a file, whose fixtures have ended."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        before = item.config.stash[_VARIABLES]
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
    return result
