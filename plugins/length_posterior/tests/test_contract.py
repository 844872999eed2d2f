"""The contract of a prioritizer, and what the plug-in is for, on the simulator."""

from seer_length_posterior import LongestPlausible
from seer_testing import PrioritizerContract

pytest_plugins = ["seer_testing.simulate"]


class TestLongestPlausible(PrioritizerContract):
    def make(self):
        return LongestPlausible(surprise=0.05)


class TestLongestPlausibleWithLongTurns(PrioritizerContract):
    def make(self):
        return LongestPlausible(surprise=0.05, turn_tokens=100)


def test_responses_that_do_not_fit_side_by_side_take_turns_so_that_none_is_left_for_the_end(simulation):
    """Two long groups of three, four places: first come first served ends with two of four."""
    groups = [(20, 22, 21), (300, 310, 290), (305, 295, 300)]
    few = {"instances": 1, "max_running": 4, "kv_capacity_tokens": 4096}
    chunks = {"divided_rollout": {"chunk_tokens": 32}}
    plain = simulation.run([], groups, **few)
    found = simulation.run(["divided_rollout", "length_posterior"], groups, settings=chunks, **few)
    assert found.makespan_s < plain.makespan_s
    assert found.tokens == plain.tokens
