"""How long the responses of one iteration are, by group: drawn from a distribution."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from random import Random
from statistics import NormalDist
from typing import Annotated

import msgspec
from msgspec import Meta
from seer_sim.lengths import Lengths, Sigma, normal_of

from seer_core.plugins.config_types import MOST, Share
from seer_core.ports.engine import ChunkJob

__all__ = [
    "LONGEST",
    "DrawnLengths",
    "GroupLengths",
    "RecordedTurn",
    "Tokens",
    "TrueLengths",
    "joined",
    "last_epoch",
    "with_longer_turns",
]

LONGEST = 10_000_000
"""Tokens of a prompt or a response; more than any model takes."""

Tokens = Annotated[int, Meta(ge=1, le=LONGEST)]

LONGEST_TOOL_S = 1e6
"""Seconds of a tool; eleven days."""

_NORMAL = NormalDist()


class RecordedTurn(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """One turn of a trajectory: the model's tokens, the seconds of its tool if any, the answer's tokens."""

    model_tokens: Tokens
    tool_s: Annotated[float, Meta(ge=0, le=LONGEST_TOOL_S)] | None
    answer_tokens: Annotated[int, Meta(ge=0, le=LONGEST)]


class GroupLengths(msgspec.Struct, frozen=True):
    """One prompt group: its prompt, and how long each of its responses is, at most ``max_tokens``.

    Where tools answered, ``turns`` has those of each response, whose length is that of all of them.
    """

    id: str
    prompt_tokens: int
    output_tokens: tuple[int, ...]
    max_tokens: int
    turns: tuple[tuple[RecordedTurn, ...], ...] = ()


def joined(iterations: Sequence[Sequence[GroupLengths]], count: int) -> list[list[GroupLengths]]:
    """Return groups of an iteration, each made of up to ``count`` recorded ones, one after another.

    So a trajectory has the turns of all their trajectories of its index, and each prompt but the first is
    what follows the last turn before, at once.  A group has as many trajectories as its smallest part.
    """
    return [
        [_joined(groups[start : start + count]) for start in range(0, len(groups), count)]
        for groups in iterations
    ]


def _joined(parts: Sequence[GroupLengths]) -> GroupLengths:
    trajectories = []
    for of_parts in zip(*(part.turns for part in parts), strict=False):
        turns: list[RecordedTurn] = []
        for part, more in zip(parts, of_parts, strict=True):
            if turns and not turns[-1].answer_tokens:
                turns[-1] = RecordedTurn(turns[-1].model_tokens, 0.0, part.prompt_tokens)
            turns += more
        trajectories.append(tuple(turns))
    tokens = tuple(map(_tokens, trajectories))
    first = parts[0]
    return GroupLengths(first.id, first.prompt_tokens, tokens, max(tokens), tuple(trajectories))


def with_longer_turns(
    iterations: Sequence[Sequence[GroupLengths]], turn_tokens: float, tool_times: float
) -> list[list[GroupLengths]]:
    """Return groups whose turns have so many times the tokens, and whose tools take so many times as long."""

    def scaled(turn: RecordedTurn) -> RecordedTurn:
        tool_s = None if turn.tool_s is None else turn.tool_s * tool_times
        answer_tokens = max(round(turn.answer_tokens * turn_tokens), min(turn.answer_tokens, 1))
        return RecordedTurn(max(1, round(turn.model_tokens * turn_tokens)), tool_s, answer_tokens)

    found = []
    for groups in iterations:
        turns = [tuple(tuple(map(scaled, each)) for each in group.turns) for group in groups]
        found.append(
            [
                msgspec.structs.replace(group, turns=each, output_tokens=tuple(map(_tokens, each)))
                for group, each in zip(groups, turns, strict=True)
            ]
        )
    limit = max(max(group.output_tokens) for groups in found for group in groups)
    return [[msgspec.structs.replace(group, max_tokens=limit) for group in groups] for groups in found]


def _tokens(turns: Sequence[RecordedTurn]) -> int:
    return sum(turn.model_tokens + turn.answer_tokens for turn in turns)


def last_epoch(group: GroupLengths, seed: int) -> tuple[int, ...]:
    """Return lengths that a group's responses may have had in the last epoch: its own, drawn with repeats.

    So no policy has changed the model in between; what such lengths are worth is an upper limit.
    """
    return tuple(Random(f"{seed} {group.id}").choices(group.output_tokens, k=len(group.output_tokens)))


class TrueLengths(Lengths, frozen=True):
    """Each response's length by request id, which simulated engines have and policies must not see.

    Where tools answer, ``by_turn`` has that of each turn, by request id and the context before the turn.
    """

    by_request: dict[str, int] = msgspec.field(default_factory=dict)
    by_turn: dict[tuple[str, int], int] = msgspec.field(default_factory=dict)

    def of(self, job: ChunkJob) -> int:
        """Return the true length of the response, or of its turn, in tokens."""
        if job.turns:
            return self.by_turn[job.request_id, job.context_tokens]
        return self.by_request[job.request_id]


MOST_TOKENS = 2**53
"""Integers that a float holds exactly."""


class DrawnLengths(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Log-normal lengths, correlated within a group, cut at ``cap_tokens``.

    ``mean_tokens`` is the mean after the cut; ``sigma`` the standard deviation of the logarithm before it,
    so the weight of the tail; ``group_share`` the part of its variance that a group's responses share.
    """

    groups: Annotated[int, Meta(ge=1)]
    group_size: Annotated[int, Meta(ge=1)]
    mean_tokens: Annotated[float, Meta(ge=1, le=MOST)]
    cap_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)]
    sigma: Sigma
    group_share: Share
    prompt_tokens: Annotated[int, Meta(ge=1, le=MOST_TOKENS)] = 1024

    def draw(self, seed: int) -> list[GroupLengths]:
        """Return one iteration's groups, which depend on the seed alone."""
        mu = _log_median(self.mean_tokens, self.sigma, self.cap_tokens)
        shared, own = sqrt(self.group_share), sqrt(1 - self.group_share)

        def length(group: int, index: int, common: float) -> int:
            z = shared * common + own * normal_of(f"{seed} {group} {index}")
            return min(max(1, round(exp(mu + self.sigma * z))), self.cap_tokens)

        drawn = []
        for group in range(self.groups):
            common = normal_of(f"{seed} {group}")
            lengths = tuple(length(group, index, common) for index in range(self.group_size))
            drawn.append(GroupLengths(f"g{group}", self.prompt_tokens, lengths, self.cap_tokens))
        return drawn


def _log_median(mean: float, sigma: float, cap: int) -> float:
    """Return the mu for which the mean of min(X, cap) is ``mean``, X log-normal; bisected.

    The mean of min(X, c) is exp(mu + sigma^2 / 2) Phi((ln c - mu) / sigma - sigma) + c (1 - Phi((ln c - mu)
    / sigma)).
    """
    if sigma == 0:
        return log(mean)

    def capped(mu: float) -> float:
        z = (log(cap) - mu) / sigma
        return exp(mu + sigma**2 / 2) * _NORMAL.cdf(z - sigma) + cap * (1 - _NORMAL.cdf(z))

    low, high = 0.0, log(cap) + 8 * sigma
    for _ in range(80):
        middle = (low + high) / 2
        if capped(middle) < mean:
            low = middle
        else:
            high = middle
    return high
