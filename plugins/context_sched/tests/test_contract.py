"""The contract of a prioritizer, and what the plug-in is for, in the lab."""

import pytest
from seer_context_sched import ContextAware

from seer_core.testing import PrioritizerContract

pytest_plugins = ["seer_core.testing.lab"]


class TestContextAware(PrioritizerContract):
    def make(self):
        return ContextAware(guard_interval=3)


class TestContextAwareWithoutGuard(PrioritizerContract):
    def make(self):
        return ContextAware(guard_interval=0)


@pytest.mark.parametrize("guard_interval", [0, 2])
def test_the_longest_group_is_over_sooner_than_first_come_first_served(lab, guard_interval):
    short, long = (20, 22, 21, 19), (300, 310, 290, 305)
    groups = [short, short, short, long]
    few = {"instances": 1, "max_running": 4}
    plain = lab.run([], groups, **few)
    found = lab.run(
        ["context_sched"], groups, settings={"context_sched": {"guard_interval": guard_interval}}, **few
    )
    assert found.makespan_s < plain.makespan_s
    assert found.tokens == plain.tokens
