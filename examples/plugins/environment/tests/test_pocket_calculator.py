import asyncio

from seer_session.environment import ModelTurn, Trajectory
from seer_testing import EnvironmentContract

from seer_pocket_calculator import PocketCalculator

pytest_plugins = ["seer_testing.simulate"]

TRAJECTORY = Trajectory("g/0", "g", 0, 7, (1, 2, 3), {"answer": "07"}, {})


class TestPocketCalculator(EnvironmentContract):
    metadata = {"answer": "5"}  # noqa: RUF012

    def make(self):
        return PocketCalculator()


def answers(*turns):
    """Return the answers to turns of one response, each a text and its stop reason."""

    async def play():
        environment = PocketCalculator()
        await environment.reset(TRAJECTORY, ())
        found = []
        for number, (text, stop_reason) in enumerate(turns):
            turn = ModelTurn(number, [5], text, stop_reason, 100)
            found.append(await environment.step(TRAJECTORY, turn))
        return found

    return asyncio.run(play())


def test_it_adds_and_goes_on_from_the_last_value():
    found = answers(("then 8 1 + 2 3", "="), ("over - 9 7", "="), ("and then", "="))
    assert [each.text for each in found] == [" 104", " 07", " ?"]


def test_a_response_that_ends_in_the_right_answer_is_rewarded():
    assert [each.reward for each in answers(("answer 0 7", None))] == [1.0]
    assert [each.reward for each in answers(("answer none", None))] == [0.0]


def test_it_answers_the_turns_of_simulated_responses(simulation):
    result = simulation.run(["pocket_calculator"])
    assert {each.finish_reason for each in result.completions} == {"stop"}
    assert all(len(each.turns) == 1 for each in result.completions)
