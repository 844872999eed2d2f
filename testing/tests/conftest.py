"""Broken plug-ins: each contract has to catch them."""

import pytest
from hypothesis import Phase
from seer_testing import rollouts

from seer_core.errors import SeerError


@pytest.fixture
def catches(monkeypatch):
    """Return a function that runs one test of a contract and returns the fault it found.

    Rollouts that show a fault are not made shorter: that takes seconds and finds no other fault.
    """
    quiet = rollouts.quiet
    monkeypatch.setattr(
        rollouts, "quiet", lambda *given, **more: quiet(*given, phases=[Phase.generate], **more)
    )

    def run(contract, test):
        with pytest.raises((AssertionError, SeerError)) as caught:
            getattr(contract(), test)()
        return str(caught.value)

    return run


@pytest.fixture(scope="session")
def uncaught():
    """Return a function: the tests of a contract that no broken plug-in of a table of them has failed."""

    def missing(contract, broken):
        tests = {name for name in dir(contract) if name.startswith("test_")}
        return tests - {test for contract_class, test, _ in broken if issubclass(contract_class, contract)}

    return missing
