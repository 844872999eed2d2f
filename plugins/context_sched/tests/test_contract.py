"""The contract of a prioritizer, and what the plug-in is for, on the simulator."""

from seer_context_sched import ContextAware
from seer_testing import PrioritizerContract

pytest_plugins = ["seer_testing.simulate"]


class TestContextAware(PrioritizerContract):
    def make(self):
        return ContextAware()


def test_the_longest_group_is_over_sooner_than_first_come_first_served(simulation):
    short, long = (20, 22, 21, 19), (300, 310, 290, 305)
    groups = [short, short, short, long]
    few = {"instances": 1, "max_running": 4}
    plain = simulation.run([], groups, **few)
    found = simulation.run(["context_sched"], groups, **few)
    assert found.makespan_s < plain.makespan_s
    assert found.tokens == plain.tokens
