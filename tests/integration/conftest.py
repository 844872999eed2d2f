"""Sessions on the simulator, and over engines that a test plays by hand."""

import pytest
from seer_session import Session

from .helpers import SMALL


@pytest.fixture
def config(write_config):
    return write_config(["divided_rollout"], SMALL)


@pytest.fixture
def played(config, by_hand):
    """Return a function that makes a session over engines that are played by hand."""

    def make(*engines):
        session = Session(config)
        session.runtime = by_hand(*engines)
        return session

    return make
