from seer_testing import PlacerContract

from seer_most_room import MostRoom

pytest_plugins = ["seer_testing.simulate"]


class TestMostRoom(PlacerContract):
    def make(self):
        return MostRoom()


def test_all_instances_work_and_none_preempts(simulation):
    slots = {"placer": "most_room"}
    result = simulation.run(["divided_rollout", "most_room"], instances=3, slots=slots)
    busy = {name for completion in result.completions for name in completion.instances}
    assert busy == {"sim-0", "sim-1", "sim-2"}
    assert result.preemptions == 0
