"""Seer: a pluggable, exact scheduler for the rollout phase of synchronous RL on language models.

From a script: ``rollout(config, prompts)``.  From a trainer: ``Session``.  In an event loop: ``Runtime``.
"""

from seer_core.errors import SeerError
from seer_core.model import Completion, PromptGroup, Sampling
from seer_core.model.results import RolloutResult, Summary
from seer_core.plugins.config import Config, load_config
from seer_core.runtime.rollout import Rollout
from seer_core.runtime.runtime import Runtime
from seer_core.runtime.session import Session, rollout

__all__ = [
    "Completion",
    "Config",
    "PromptGroup",
    "Rollout",
    "RolloutResult",
    "Runtime",
    "Sampling",
    "SeerError",
    "Session",
    "Summary",
    "load_config",
    "rollout",
]
