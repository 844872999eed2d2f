"""Variables that tests have set, or a library as a test imported it, last no longer than the file.

A fork server serves the engines that have its variables.  If those changed in the midst of a run, each engine
would be imported once more, which takes ten seconds.
"""

import os

import pytest

_VARIABLES = pytest.StashKey[dict[str, str]]()


@pytest.hookimpl(trylast=True)
def pytest_collection_finish(session):
    """Keep what the run was started with, and what files of fixtures have set."""
    session.config.stash[_VARIABLES] = dict(os.environ)


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
