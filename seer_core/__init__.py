"""Seer: a pluggable, exact scheduler for the rollout phase of synchronous RL on language models.

The core takes groups of requests in tokens and drives engines: ``Driver``.  ``seer_session`` has what a
script or a trainer holds.
"""

from importlib import import_module
from typing import Any

from seer_core.errors import SeerError
from seer_core.model import Completion, PromptGroup, Sampling
from seer_core.runtime.driver import Driver

__all__ = [
    "Completion",
    "Driver",
    "PromptGroup",
    "Sampling",
    "SeerError",
]

ABOVE = {
    "Config",
    "Rollout",
    "RolloutResult",
    "Runtime",
    "Session",
    "SharedWeights",
    "Summary",
    "load_config",
    "rollout",
}
"""Names that people look for here, and that stand above the core."""


def __getattr__(name: str) -> Any:
    """Return one of these where its distribution is installed."""
    if name in ABOVE:
        return getattr(import_module("seer_session"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
