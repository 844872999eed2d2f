"""How long a response of a group may plausibly be, given what the group has generated so far."""

from math import inf, pow

__all__ = ["plausible_tokens"]


def plausible_tokens(finished: int, tokens: int, surprise: float) -> float:
    """Return the length that a response of the group exceeds with probability ``surprise``.

    ``finished`` responses are over, and all of the group's together, the unfinished included, have
    generated ``tokens``; without a finished one any length is plausible, so the answer is infinite.
    Lengths are taken as exponential with an unknown rate.  Then a response that still runs counts for what
    it has, without being taken for short: the likelihood is ``rate ** finished * exp(-rate * tokens)``
    ("total time on test", Epstein and Sobel 1953).  With Jeffreys' prior, 1 / rate, the rate's posterior is
    Gamma(finished, tokens), and a length exceeds y with probability ``(tokens / (tokens + y)) ** finished``
    (Lomax), solved here for y.
    """
    if not finished:
        return inf
    return tokens * (pow(surprise, -1 / finished) - 1)
