"""Sums: the model stops behind an expression, and goes on behind its value."""

import re
from collections.abc import Sequence

from msgspec import Struct
from seer_core.plugins.hookspecs import hookimpl
from seer_session.environment import (
    AnsweredTurn,
    Environment,
    EnvironmentAnswer,
    ModelTurn,
    Trajectory,
)

EXPRESSION = re.compile(r"(\d[\d ]*)?(\+|plus|add|-) ?(\d[\d ]*)\Z")
"""A sum or a difference at the end of a text; without a left side it goes on from the last value."""


class Settings(Struct, frozen=True):
    """``[plugin.pocket_calculator]``: values are written with so many digits at least."""

    digits: int = 2


class PocketCalculator(Environment):
    """Environment that works out what stands before a stop string, and ends where the model does."""

    def __init__(self, digits: int = 2) -> None:
        self.digits = digits
        self.asked = 0
        self._values: dict[str, int] = {}

    async def reset(self, trajectory: Trajectory, earlier: Sequence[AnsweredTurn]) -> None:
        """Begin a trajectory; the answers of an earlier process are worked out again."""
        self._values[trajectory.request_id] = 0
        for each in earlier:
            self._work_out(trajectory, each.turn)

    async def step(self, trajectory: Trajectory, turn: ModelTurn) -> EnvironmentAnswer:
        """Return a value, or the reward of the response."""
        self.asked += 1
        if turn.stop_reason is None:
            return EnvironmentAnswer(done=True, reward=_reward(trajectory, turn))
        value = self._work_out(trajectory, turn)
        return EnvironmentAnswer(text=" ?" if value is None else f" {value:0{self.digits}d}")

    async def close(self, trajectory: Trajectory) -> None:
        """Forget a trajectory."""
        self._values.pop(trajectory.request_id, None)

    def _work_out(self, trajectory: Trajectory, turn: ModelTurn) -> int | None:
        found = EXPRESSION.search((turn.text or "").strip())
        if found is None:
            return None
        left, sign, right = found.groups()
        before = _number(left) if left else self._values[trajectory.request_id]
        value = before - _number(right) if sign == "-" else before + _number(right)
        self._values[trajectory.request_id] = value
        return value


def _number(digits: str) -> int:
    """Return a number whose digits may stand apart."""
    return int(digits.replace(" ", ""))


def _reward(trajectory: Trajectory, turn: ModelTurn) -> float | None:
    """Return 1 if the response ends in the right answer, 0 if not, and None without a right one."""
    right = trajectory.metadata.get("answer")
    if right is None:
        return None
    last = re.search(r"([\d ]+|none)\Z", (turn.text or "").strip())
    return float(last is not None and last[1].replace(" ", "") == str(right))


@hookimpl
def seer_make_environment(settings: Settings) -> Environment:
    """Fill the slot."""
    return PocketCalculator(settings.digits)
