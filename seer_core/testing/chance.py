"""What contracts draw at random: the same in each run, unless ``SEER_CONTRACT_SEED`` says otherwise."""

from __future__ import annotations

import os
import random

__all__ = ["VARIABLE", "chance", "explores"]

VARIABLE = "SEER_CONTRACT_SEED"
"""The environment variable with the seed of a run that explores."""


def explores() -> bool:
    """Return whether this run draws by a seed of its own."""
    return VARIABLE in os.environ


def chance() -> random.Random:
    """Return what a story is drawn from."""
    return random.Random(os.environ.get(VARIABLE, 0))
