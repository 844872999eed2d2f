"""Which drafts a step verifies, in expectation, where a drafter chooses token by token.

A drafter like ``grouped_spec`` verifies the most probable tokens of the whole batch, as many as pay, and none
where even these do not pay.  Here a batch has one least chance for all, out of a few.  The tokens that a
batch's drafts promise differ from step to step, and are taken to follow a gamma distribution.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from math import erf, exp, lgamma, log, sqrt

import msgspec

from seer_sim.replayed import DraftedText

__all__ = ["ChosenLevel", "Offer", "choose", "gamma_tail", "offers_of", "together"]

LEAST_GAIN = 0.02
"""What drafts must add to a step's tokens per second to be verified (``seer_grouped_spec``)."""


class Offer(msgspec.Struct, frozen=True, gc=False):
    """The drafts of a batch, or of a request, in a step at one level.

    ``drafting`` requests verify ``verified`` tokens and accept ``accepted``, which varies by ``variance``.
    """

    drafting: float
    verified: float
    accepted: float
    variance: float


class ChosenLevel(msgspec.Struct, frozen=True, gc=False):
    """A level, the share of steps that draft, and the part of all acceptable tokens that these accept."""

    level: int
    share: float
    part: float


def offers_of(text: DraftedText, draft_tokens: int) -> list[Offer]:
    """Return the offers of one request, level by level, with drafts of so many tokens at most."""
    return [
        Offer(
            verified[0] if verified else 0.0,
            sum(verified[:draft_tokens]),
            sum(accepted[:draft_tokens]),
            variance,
        )
        for verified, accepted, variance in zip(text.verified, text.accepted, text.variance, strict=True)
    ]


def together(offers: Iterable[tuple[int, Offer]]) -> Offer:
    """Return the sum of offers, each of so many requests."""
    drafting = verified = accepted = variance = 0.0
    for count, offer in offers:
        drafting += count * offer.drafting
        verified += count * offer.verified
        accepted += count * offer.accepted
        variance += count * offer.variance
    return Offer(drafting, verified, accepted, variance)


def gamma_tail(mean: float, variance: float, least: float) -> tuple[float, float]:
    """Return how often a gamma variable is above ``least``, and the part of its mean that it is then.

    By Wilson and Hilferty's approximation (PNAS 17, 1931).
    """
    if least <= 0:
        return 1.0, 1.0
    if mean <= 0:
        return 0.0, 0.0
    if variance <= 1e-12 * mean * mean:
        above = float(mean > least)
        return above, above
    shape = mean * mean / variance
    x = least * mean / variance
    if x == 0:  # the product has underflown
        return 1.0, 1.0
    z = ((x / shape) ** (1 / 3) - 1 + 1 / (9 * shape)) * 3 * sqrt(shape)
    above = 0.5 * (1 - erf(z / sqrt(2)))
    density = exp(shape * log(x) - x - lgamma(shape + 1))
    return above, min(1.0, above + density)


def choose(
    batch: int, offers: Sequence[Offer], plain_s: float, seconds: Sequence[float]
) -> ChosenLevel | None:
    """Return how a batch drafts that takes ``plain_s`` without drafts; None where no level pays.

    ``seconds`` are what steps with each of the ``offers`` take.
    """
    best: ChosenLevel | None = None
    best_speed = batch / plain_s
    for level, (offer, step_s) in enumerate(zip(offers, seconds, strict=True)):
        least = batch * ((1 + LEAST_GAIN) * step_s / plain_s - 1)
        share, part = gamma_tail(offer.accepted, offer.variance, least)
        speed = (batch + part * offer.accepted) / (share * step_s + (1 - share) * plain_s)
        if share and speed > best_speed:
            best, best_speed = ChosenLevel(level, share, part), speed
    return best
