"""The logits of a choice, which an engine shows for the proof that it samples by key."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

__all__ = ["LogitRow"]


class LogitRow(NamedTuple):
    """The logits from which a request with this seed got its token at this position, float32 [vocab].

    The position counts the tokens before it, prompt included.
    """

    seed: int
    """The request's seed."""
    position: int
    """The number of tokens before it."""
    logits: NDArray[np.float32]
    """The logits of all token ids."""
