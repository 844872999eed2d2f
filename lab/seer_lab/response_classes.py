"""Responses as the bound counts them: how many tokens the model writes, behind which contexts.

Contexts are without the prompt.  Where tools answered, a trajectory is one response: its answers lie between
the tokens of the model's.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

import attrs
import msgspec
import numpy as np
from seer_sim.drafts import Drafts

from seer_lab.lengths import GroupLengths, RecordedTurn

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Floats = NDArray[np.float64]

__all__ = ["ResponseClass", "ResponsePart", "Responses"]

Turns = Sequence[RecordedTurn]


class ResponsePart(msgspec.Struct, frozen=True):
    """An equal part of the tokens of each response of a class.

    ``least`` and ``most`` bound the context, ``mean`` is its mean over the tokens.
    """

    least: float
    most: float
    mean: float


class ResponseClass(msgspec.Struct, frozen=True):
    """Responses of like lengths: their number, the mean of their tokens, and the parts of each.

    ``tools_s`` is the mean time of their tools.  ``row`` is that of their acceptance, and ``is_last`` says
    whether they are the longest of their groups.
    """

    count: int
    tokens: float
    tools_s: float
    parts: tuple[ResponsePart, ...]
    row: int
    is_last: bool


@attrs.frozen(eq=False)
class Responses:
    """All responses, in arrays: ``tokens`` that the model writes [responses], and ``tools_s`` [responses].

    An answer of ``answer_tokens`` [responses, answers] follows that many tokens of the model's, ``places``.
    ``rows`` and ``lasts`` [responses] are those of ``ResponseClass``.
    """

    tokens: Floats
    tools_s: Floats
    places: Floats
    answer_tokens: Floats
    rows: NDArray[np.int64]
    lasts: NDArray[np.bool_]

    @classmethod
    def of(cls, groups: Sequence[GroupLengths], drafts: Drafts | None) -> Responses:
        """Return the responses of groups; with drafts, each has a row of acceptance by its group's order."""
        tokens, turns, rows, lasts = [], [], [], []
        for group in groups:
            trajectories = group.turns or ((),) * len(group.output_tokens)
            written = [
                sum(turn.model_tokens for turn in each) or length
                for each, length in zip(trajectories, group.output_tokens, strict=True)
            ]
            ranked = sorted(range(len(written)), key=written.__getitem__)
            for rank, index in enumerate(ranked):
                tokens.append(written[index])
                turns.append(trajectories[index])
                rows.append(0 if drafts is None else drafts.row(rank, written[index]))
                lasts.append(drafts is not None and rank == len(ranked) - 1)
        places, answer_tokens = _answers(turns)
        tools_s = [sum(turn.tool_s or 0.0 for turn in each[:-1]) for each in turns]
        return cls(
            np.array(tokens, float),
            np.array(tools_s, float),
            places,
            answer_tokens,
            np.array(rows),
            np.array(lasts),
        )

    def classes(self, most: int, parts: int) -> list[ResponseClass]:
        """Divide the responses by the row of their acceptance and by length, the longest ones finest.

        There are ``most`` classes of a row, and each response has so many ``parts``.
        """
        edges = self.tokens[:, None] * np.arange(parts + 1) / parts
        least = edges[:, :-1] + self._answered(edges[:, :-1], at=True)
        end = edges[:, 1:] + self._answered(edges[:, 1:], at=False)
        means = np.diff(self._summed(edges)) * parts / self.tokens[:, None]
        found = []
        for row, is_last in sorted({*zip(self.rows.tolist(), self.lasts.tolist(), strict=True)}):
            mine = np.flatnonzero((self.rows == row) & (self.lasts == is_last))
            mine = mine[np.argsort(self.tokens[mine], kind="stable")]
            count = len(mine)
            cuts = sorted({0, *(count - round(x) for x in np.geomspace(1, count, most)), count})
            for start, stop in pairwise(cuts):
                part = mine[start:stop]
                mean = np.average(means[part], axis=0, weights=self.tokens[part])
                limits = zip(least[part].min(axis=0), end[part].max(axis=0), mean, strict=True)
                found.append(
                    ResponseClass(
                        count=stop - start,
                        tokens=float(self.tokens[part].mean()),
                        tools_s=float(self.tools_s[part].mean()),
                        parts=tuple(ResponsePart(*map(float, each)) for each in limits),
                        row=row,
                        is_last=is_last,
                    )
                )
        return found

    @property
    def mean_contexts(self) -> Floats:
        """The mean context of each response's tokens [responses]."""
        found: Floats = self._summed(self.tokens[:, None])[:, 0] / self.tokens
        return found

    def _answered(self, edges: Floats, *, at: bool) -> Floats:
        """Return the tokens of the answers that lie before these tokens of the model's, or ``at`` them."""
        places = self.places[:, None, :]
        before = places <= edges[:, :, None] if at else places < edges[:, :, None]
        found: Floats = (self.answer_tokens[:, None, :] * before).sum(axis=-1)
        return found

    def _summed(self, edges: Floats) -> Floats:
        """Return the contexts summed over the tokens before these."""
        behind = np.maximum(0.0, edges[:, :, None] - self.places[:, None, :])
        found: Floats = edges**2 / 2 + (self.answer_tokens[:, None, :] * behind).sum(axis=-1)
        return found


def _answers(trajectories: Sequence[Turns]) -> tuple[Floats, Floats]:
    """Return the places and lengths of answers, both [trajectories, answers]; the last turn has none."""
    most = max([0, *(len(turns) - 1 for turns in trajectories)])
    places = np.zeros((len(trajectories), most))
    answer_tokens = np.zeros((len(trajectories), most))
    for number, turns in enumerate(trajectories):
        written = 0
        for place, turn in enumerate(turns[:-1]):
            written += turn.model_tokens
            places[number, place] = written
            answer_tokens[number, place] = turn.answer_tokens
    return places, answer_tokens
