"""Recorded turns on simulated and paced engines: an environment that answers as the tools did; figures."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec
from seer_session.environment import Environment, EnvironmentAnswer, ModelTurn, Trajectory

from seer_core.model import Completion
from seer_lab.lengths import GroupLengths

__all__ = ["RecordedTools", "TurnFigures", "turn_figures", "turn_lengths"]

ANSWER_TOKEN = 7
"""What all answers consist of.  To a prefix cache they differ by the contexts before them."""


class RecordedTools(Environment):
    """Answers each turn with as many tokens as its tool did, after as many seconds."""

    def __init__(self, groups: Iterable[GroupLengths]) -> None:
        self._turns = {
            f"{group.id}/{index}": turns for group in groups for index, turns in enumerate(group.turns)
        }

    async def step(self, trajectory: Trajectory, turn: ModelTurn) -> EnvironmentAnswer:
        """Return the recorded answer; the response ends with the last one."""
        turns = self._turns[trajectory.request_id]
        recorded = turns[turn.number]
        return EnvironmentAnswer(
            token_ids=[ANSWER_TOKEN] * recorded.answer_tokens,
            done=turn.number == len(turns) - 1,
            delay_s=recorded.tool_s or 0.0,
        )


def turn_lengths(groups: Iterable[GroupLengths]) -> dict[tuple[str, int], int]:
    """Return how many tokens the model writes in each turn, by request id and the context before the turn."""
    lengths: dict[tuple[str, int], int] = {}
    for group in groups:
        for index, turns in enumerate(group.turns):
            context = group.prompt_tokens
            for turn in turns:
                lengths[f"{group.id}/{index}", context] = turn.model_tokens
                context += turn.model_tokens + turn.answer_tokens
    return lengths


class TurnFigures(msgspec.Struct, frozen=True):
    """Figures of the turns that follow a tool's answer.

    ``kv_hits``: of the context before the answer, the part whose KV was found in the instance or the pool.
    ``longest_wait_s``: from an answer to the first step of the turn that follows it.
    """

    kv_hits: float
    longest_wait_s: float


def turn_figures(
    completions: Sequence[Completion],
    prompt_tokens: Mapping[str, int],
    first_steps_s: Sequence[Mapping[tuple[str, int], float]],
) -> TurnFigures:
    """Return the figures of a rollout, by its groups' prompts and the first steps of turns on each engine."""
    found = begun = 0
    longest_s = 0.0
    for completion in completions:
        context = prompt_tokens[completion.group_id]
        chunks = iter(completion.chunks)
        answered_s: float | None = None
        for turn in completion.turns:
            written, chunk = 0, None
            while written < turn.tokens:
                chunk = next(chunks)
                if answered_s is not None and not written:
                    found += chunk.cached_tokens + chunk.pool_tokens
                written += chunk.tokens
            assert chunk is not None
            if answered_s is not None:
                turn_id = completion.request_id, context
                step_s = min(steps[turn_id] for steps in first_steps_s if turn_id in steps)
                longest_s = max(longest_s, step_s - answered_s)
            context += turn.tokens
            begun += context if turn is not completion.turns[-1] else 0
            context += turn.answer_tokens
            answered_s = chunk.finished_s + (turn.environment_s or 0.0)
    return TurnFigures(found / begun if begun else 0.0, longest_s)
