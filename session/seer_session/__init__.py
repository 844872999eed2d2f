"""Rollouts from prompts: a short form for scripts, sessions for trainers, turns that environments answer.

From a script: ``rollout(config, prompts)``.  From a trainer: ``Session``.  In an event loop: ``Runtime``.
"""

from seer_host.config_files import Config, load_config
from seer_host.shared_weights import SharedWeights

from seer_core import Completion, PromptGroup, Sampling, SeerError
from seer_session.results import RolloutResult, Summary
from seer_session.rollouts import Rollout
from seer_session.runtime import Runtime
from seer_session.session import Session, SessionRollout, rollout

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
    "SessionRollout",
    "SharedWeights",
    "Summary",
    "load_config",
    "rollout",
]
