"""Recorded trajectories of agents, one a line: what the model wrote, and what its tools took and answered."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from seer_core.errors import quote
from seer_lab.lengths import LONGEST, GroupLengths, RecordedTurn, Tokens

__all__ = ["TRAJECTORY", "TrajectoryLine", "flaws_of", "iterations_of"]

TRAJECTORY = (
    'such as {"group": "a", "index": 0, "prompt_tokens": 300, "turns": [[40, 0.2, 500], [131, null, 0]]}'
)

Name = tuple[str, int, str | int]


class TrajectoryLine(msgspec.Struct, frozen=True):
    """One line: a trajectory, by its number in its group; other keys are allowed and can be selected by.

    Trajectories of one ``iteration`` are rolled out together.
    """

    group: str | int
    index: Annotated[int, Meta(ge=0)]
    prompt_tokens: Tokens
    turns: Annotated[tuple[RecordedTurn, ...], Meta(min_length=1)]
    iteration: int = 0
    workload: str = ""

    @property
    def tokens(self) -> int:
        """All tokens after the prompt."""
        return sum(turn.model_tokens + turn.answer_tokens for turn in self.turns)


def flaws_of(found: Sequence[tuple[int, TrajectoryLine]]) -> Iterator[tuple[int, str]]:
    """Yield number and flaw of lines that are well-formed and cannot be."""
    seen: dict[tuple[Name, int], int] = {}
    prompts: dict[Name, tuple[int, int]] = {}
    for number, line in found:
        name = (line.workload, line.iteration, line.group)
        where = f"group {quote(line.group)} of iteration {line.iteration}"
        if (name, line.index) in seen:
            yield number, f"index {line.index} of {where} is in line {seen[name, line.index]} already"
        seen.setdefault((name, line.index), number)
        tokens, first = prompts.setdefault(name, (line.prompt_tokens, number))
        if line.prompt_tokens != tokens:
            yield number, f"prompt_tokens is {line.prompt_tokens}, and in line {first} of {where} {tokens}"
        if line.tokens > LONGEST:
            yield number, f"its turns have {line.tokens} tokens; a trajectory has {LONGEST} at most"
        for place, turn in enumerate(line.turns):
            is_last = place == len(line.turns) - 1
            if turn.tool_s is None and turn.answer_tokens:
                yield number, f"turns[{place}] has an answer and no tool; give the tool's seconds"
            elif not is_last and not turn.answer_tokens:
                yield number, f"turns[{place}] has no answer, and is not the last; give the answer's tokens"


def iterations_of(lines: Sequence[TrajectoryLine]) -> list[list[GroupLengths]]:
    """Return the groups of each iteration, their trajectories by index; the longest one is the limit."""
    limit = max(line.tokens for line in lines)
    iterations: dict[int, dict[str | int, list[TrajectoryLine]]] = {}
    for line in lines:
        iterations.setdefault(line.iteration, {}).setdefault(line.group, []).append(line)
    return [
        [_group(str(name), lines, limit) for name, lines in iterations[number].items()]
        for number in sorted(iterations)
    ]


def _group(name: str, lines: Sequence[TrajectoryLine], limit: int) -> GroupLengths:
    lines = sorted(lines, key=lambda line: line.index)
    tokens = tuple(line.tokens for line in lines)
    turns = tuple(line.turns for line in lines)
    return GroupLengths(name, lines[0].prompt_tokens, tokens, limit, turns)
