"""Contract of the Protocol ``seer_session.environment.Environment``."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
from seer_session.environment import Environment, EnvironmentAnswer, ModelTurn, Trajectory

from seer_core.ports.contracts import implemented
from seer_testing.support import expect_contract, run_within

__all__ = ["EnvironmentContract"]

TRAJECTORIES = 8
"""Responses that the environment answers at once."""


class EnvironmentContract:
    """Tests of an ``Environment``; ``make`` returns a new one, not yet started."""

    metadata: dict[str, Any] = {}  # noqa: RUF012, a subclass replaces it
    """The data of the prompts that are tried."""
    turns: tuple[tuple[str, str | int | None], ...] = (("2 + 3", "="), ("so it is 5", None))
    """The turns that the model writes, in order: the text of each, and its stop reason."""
    patience_s: float = 30.0
    """Seconds after which a wait has failed."""

    def make(self) -> Environment:
        """Return a new environment."""
        raise NotImplementedError("define make(), which returns a new environment")

    def test_it_is_an_environment(self) -> None:
        """It has the method of the Protocol."""
        expect_contract(self.make(), Environment)

    def test_it_answers_every_turn(self) -> None:
        """Each answer has one of tokens, text and messages, or ends the response."""
        for answers in self._answers(self.make()):
            assert answers, "it answered nothing"
            for answer in answers:
                parts = (answer.token_ids, answer.text, answer.messages)
                given = [part for part in parts if part is not None]
                assert len(given) <= 1, f"{answer} has more than one of token_ids, text and messages"
                assert answer.done or any(given), f"{answer} neither goes on nor ends the response"

    def test_responses_do_not_disturb_one_another(self) -> None:
        """Responses to one prompt with the same turns have the same answers, many at once."""
        first, *others = self._answers(self.make())
        assert all(answers == first for answers in others)

    def test_its_answers_can_be_repeated(self) -> None:
        """A run that is begun anew gives the same responses only if the environment does."""
        assert self._answers(self.make()) == self._answers(self.make())

    def test_it_leaves_the_prompt_s_data_alone(self) -> None:
        """The whole group has the same."""
        before = msgspec.msgpack.encode(self.metadata)
        self._answers(self.make())
        assert msgspec.msgpack.encode(self.metadata) == before

    def _answers(self, environment: Environment) -> list[list[EnvironmentAnswer]]:
        """Return the answers to several trajectories, which are played at once."""

        async def play(index: int) -> list[EnvironmentAnswer]:
            trajectory = Trajectory(f"g/{index}", "g", index, 7, (1, 2, 3), self.metadata, {})
            if (reset := implemented(environment, "reset")) is not None:
                await _call(reset, trajectory, ())
            answers: list[EnvironmentAnswer] = []
            for number, (text, stop_reason) in enumerate(self.turns):
                turn = ModelTurn(number, [5] * len(text.split()), text, stop_reason, 100)
                answer = await _call(environment.step, trajectory, turn)
                assert isinstance(answer, EnvironmentAnswer), f"{answer!r} is no EnvironmentAnswer"
                answers.append(answer)
                if answer.done:
                    break
            if (close := implemented(environment, "close")) is not None:
                await _call(close, trajectory)
            return answers

        async def play_all() -> list[list[EnvironmentAnswer]]:
            if (start := implemented(environment, "start")) is not None:
                await start()
            try:
                return await asyncio.gather(*(play(index) for index in range(TRAJECTORIES)))
            finally:
                if (stop := implemented(environment, "stop")) is not None:
                    await stop()

        return run_within(self.patience_s, play_all(), "a method of the environment")


async def _call(method: Callable[..., Any], *arguments: Any) -> Any:
    answer = method(*arguments)
    return await answer if asyncio.iscoroutine(answer) else answer
