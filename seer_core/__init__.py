"""Seer: a pluggable, exact scheduler for the rollout phase of synchronous RL on language models.

The core takes groups of requests in tokens and drives engines: ``Driver``.  ``seer_session`` has what a
script or a trainer holds.
"""

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
