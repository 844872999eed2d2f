"""Whether a run fails although its tests have passed."""

import pytest

_FAILED = pytest.StashKey[bool]()


def fail(session):
    """Fail this run, also if its tests pass, the first or the second time."""
    session.config.stash[_FAILED] = True
    if session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def is_failed(session):
    """Return whether something else than its tests has failed this run."""
    return session.config.stash.get(_FAILED, False)
