"""How long a response of a group may plausibly be, given what the group has generated so far."""

from __future__ import annotations

from math import exp, inf, log

__all__ = ["SHAPES", "GroupPosterior", "Shapes"]

SHAPES = (0.7, 1.4, 2.8)
"""Weibull shapes that a group's lengths may have: their logarithms deviate by 1.8, 0.9 and 0.46.

That is pi / sqrt(6) / shape.  The last is the most alike that responses are taken to be (fitted in the
simulator): with larger ones the first responses of a group to end are believed too much.
"""

LOG_SHAPES = tuple(log(shape) for shape in SHAPES)


class Shapes:
    """How many groups each shape explains: the odds with which another group begins.

    A group counts once, in parts, by its present posterior (incremental EM, Neal and Hinton 1998); each shape
    has one group for a start.
    """

    def __init__(self) -> None:
        self.groups = [1.0] * len(SHAPES)

    def explain(self, evidence: list[float], before: list[float]) -> list[float]:
        """Return a group's posterior, from its evidence as logarithms; count it instead of ``before``."""
        most = max(evidence)
        groups = self.groups
        odds = [
            (count - old) * exp(term - most)
            for count, old, term in zip(groups, before, evidence, strict=True)
        ]
        total = sum(odds)
        weights = [each / total for each in odds]
        self.groups = [count - old + new for count, old, new in zip(groups, before, weights, strict=True)]
        return weights


class GroupPosterior:
    """The tokens that a group has generated, and the distribution of lengths that follows from them.

    Lengths are Weibull, so to the power of the shape k they are exponential, with a rate of which nothing is
    known beforehand.  Then a response that still runs counts for what it has, without being taken for short.
    With f responses over and t the sum of all responses' powers, the unfinished included, the likelihood is
    ``k ** f * product of powers (k - 1) * rate ** f * exp(-rate * t)`` ("total time on test", Epstein and
    Sobel 1953).  With Jeffreys' prior on the scale the rate's posterior is Gamma(f, t); a response that has g
    tokens exceeds y with probability ``(t / (t + y ** k - g ** k)) ** f`` (Lomax); and the evidence for k is
    ``k ** (f - 1) * product of powers (k - 1) / t ** f``, times what is the same for all shapes.
    """

    def __init__(self, shapes: Shapes) -> None:
        self.finished = 0
        self.totals = [0.0] * len(SHAPES)
        self.weights = [0.0] * len(SHAPES)
        self._shapes = shapes
        self._log_tokens = 0.0

    def grow(self, before: int, tokens: int, over: bool = False) -> None:
        """Learn that a response went from ``before`` tokens to ``tokens``, and whether it ended there."""
        if tokens == before and not over:
            return
        totals = self.totals
        for index, shape in enumerate(SHAPES):
            totals[index] += tokens**shape - before**shape
        if over:
            self.finished += 1
            self._log_tokens += log(tokens)
        finished = self.finished
        if finished:
            evidence = [
                (finished - 1) * log_shape + (shape - 1) * self._log_tokens - finished * log(total)
                for shape, log_shape, total in zip(SHAPES, LOG_SHAPES, totals, strict=True)
            ]
            self.weights = self._shapes.explain(evidence, self.weights)

    def plausible_tokens(self, generated: int, surprise: float) -> float:
        """Return the longest that a response with ``generated`` tokens may plausibly become.

        That a shape is the group's and the response becomes longer has, for each, at most the probability
        ``surprise``.  Without a finished response any length is plausible, so the answer is infinite.
        """
        if not self.finished:
            return inf
        longest = float(generated)
        for shape, total, weight in zip(SHAPES, self.totals, self.weights, strict=True):
            if weight > surprise:
                more = total * ((weight / surprise) ** (1 / self.finished) - 1)
                longest = max(longest, (generated**shape + more) ** (1 / shape))
        return longest
