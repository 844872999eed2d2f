"""The walks of ``examples/tiny_reasoner`` with a calculator, under a budget of tokens that the model writes.

The model writes sums in four ways: ``28 + 39 =``, ``is``, ``gives`` or ``makes``.  Behind ``=`` the
calculator writes the value, which costs the model nothing.  Behind the other words the model works it out
itself.
"""

from __future__ import annotations

import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from seer_session.environment import AnsweredTurn, EnvironmentAnswer, ModelTurn, Trajectory

sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_reasoner"))
sys.path.insert(0, str(Path(__file__).parents[1] / "tiny_rl"))

import task
from budget import make_problem, shortest_tokens

RESPONSES = 8
SLACK_TOKENS = 14

SUM = re.compile(r"(\d ?\d) (?:\+|plus|add) (\d ?\d)\Z")
"""A place and a hop.  The number of the hop may stand just before, so a place has two digits."""
WRAP = re.compile(r"(?:(\d[\d ]*) )?(?:over|wrap|past|beyond) - (\d ?\d)\Z")
"""The ring, which is taken off a sum: of the turn itself, or the last one of the calculator's."""


class Calculator:
    """The environment: works sums out, and rewards a right answer that kept to the budget."""

    def __init__(self) -> None:
        self._values: dict[str, int] = {}
        self._written: dict[str, int] = {}

    async def reset(self, trajectory: Trajectory, earlier: Sequence[AnsweredTurn]) -> None:
        """Begin a trajectory; the turns of an earlier process are counted and worked out again."""
        self._values[trajectory.request_id] = self._written[trajectory.request_id] = 0
        for each in earlier:
            self._take(trajectory, each.turn)

    async def step(self, trajectory: Trajectory, turn: ModelTurn) -> EnvironmentAnswer:
        """Return the value of what stands before ``=``, or at the response's end the reward.

        A response that is over its budget ends there, with reward 0.
        """
        value = self._take(trajectory, turn)
        if self._written[trajectory.request_id] > trajectory.metadata.get("budget", sys.maxsize):
            return EnvironmentAnswer(done=True, reward=0.0)
        if turn.stop_reason is None:
            return EnvironmentAnswer(done=True, reward=task.reward(trajectory.metadata, turn.text or ""))
        return EnvironmentAnswer(text=" ?" if value is None else f" {value:02d}")

    async def close(self, trajectory: Trajectory) -> None:
        """Forget a trajectory."""
        self._values.pop(trajectory.request_id, None)
        self._written.pop(trajectory.request_id, None)

    def _take(self, trajectory: Trajectory, turn: ModelTurn) -> int | None:
        """Count a turn's tokens, and work out the sum at its end, if there is one."""
        self._written[trajectory.request_id] += len(turn.token_ids)
        value = work_out((turn.text or "").strip(), self._values[trajectory.request_id])
        if value is not None:
            self._values[trajectory.request_id] = value
        return value


def work_out(text: str, last: int) -> int | None:
    """Return the value of the expression at the end of a text, None if there is none.

    ``last`` is the value before, from which a wrap goes on.
    """
    if found := SUM.search(text):
        return _number(found[1]) + _number(found[2])
    if found := WRAP.search(text):
        before = last if found[1] is None else _number(found[1])
        return max(0, before - _number(found[2]))
    return None


def _number(digits: str) -> int:
    return int(digits.replace(" ", ""))


def own_tokens(problem: task.Problem) -> tuple[int, int]:
    """Return the tokens of the shortest right response: those that the model and the calculator write."""
    place, values = problem.start, 0
    while True:
        place += problem.hop
        values += len(f"{place:02d}")
        if place >= problem.ring:
            place -= problem.ring
            values += 2
        if place == problem.goal:
            return shortest_tokens(problem) - values, values


def prompts(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield fresh prompts for each iteration, of 6 to 10 hops."""
    rng = random.Random(f"tool-reasoner {seed} {iteration}")
    for index in range(groups):
        problem = make_problem(rng)
        own, values = own_tokens(problem)
        budget = own + SLACK_TOKENS
        yield {
            "group_id": f"{iteration}-{index}",
            "prompt": problem.prompt,
            "n": RESPONSES,
            "max_tokens": budget + values + SLACK_TOKENS,
            "metadata": {**problem.metadata(), "budget": budget},
        }


def held_out(iteration: int, groups: int, seed: int) -> Iterator[Mapping[str, object]]:
    """Yield prompts that are the same in every run; training meets none of them but by chance."""
    return prompts(-1, groups, 0)
