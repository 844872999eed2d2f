"""Fingerprints in the place of KV kept token by token: a slot holds what only its text could have put there.

A token's fingerprint is made of the token, of all before it, and of the weights' version.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from seer_paced.fingerprints import WrongKVError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

__all__ = ["Slots", "prints_of"]

VALUES = np.uint64(0x5DEE_CE66_D1CE_4E5B)
"""Makes the fingerprint of values another than that of keys."""


class Slots:
    """KV memory as words, uint64 [slots], one for a token's keys and one for its values."""

    def __init__(self, keys: Words, values: Words) -> None:
        self._keys, self._values = keys, values

    def write(self, slots: NDArray[Any], prints: Words) -> None:
        """Fill slots with what these fingerprints stand for."""
        self._keys[slots] = prints
        self._values[slots] = prints ^ VALUES

    def clear(self) -> None:
        """Write zeros over all slots."""
        self._keys.fill(0)
        self._values.fill(0)

    def check(self, slots: NDArray[Any], prints: Words, requests: Sequence[str]) -> None:
        """Compare every byte of slots with what these fingerprints stand for.

        ``requests`` names the request of each slot, or the one of all slots.

        Raises:
            WrongKVError: one does not.
        """
        wrong = np.flatnonzero((self._keys[slots] != prints) | (self._values[slots] != prints ^ VALUES))
        if len(wrong):
            place = int(wrong[0])
            request = requests[place if len(requests) > 1 else 0]
            raise WrongKVError(
                f"KV slot {int(slots[place])} of request {request!r} does not hold the KV of its text; what"
                " moved, evicted or overwrote it is at fault"
            )


def prints_of(tokens: Sequence[int] | NDArray[Any], version: int) -> Words:
    """Return a fingerprint for each token of a text, uint64 [tokens]."""
    places = np.arange(len(tokens), dtype=np.uint64)
    terms = (np.array(tokens, np.uint64) + np.uint64(1)) * (_mixed(places) | np.uint64(1))
    return _mixed(np.cumsum(terms, dtype=np.uint64) + np.uint64(version))


def _mixed(words: Words) -> Words:
    """Return words each of whose bits depends on all of a word's (splitmix64)."""
    words = words + np.uint64(0x9E37_79B9_7F4A_7C15)
    words = (words ^ (words >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    words = (words ^ (words >> np.uint64(27))) * np.uint64(0x94D0_49BB_1331_11EB)
    return words ^ (words >> np.uint64(31))
