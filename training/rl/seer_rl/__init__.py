"""Reinforcement learning on Seer's rollouts, strictly synchronous: ``seer train CONFIG``.

It uses the public API alone, as a training loop of yours would.
"""

from seer_rl.advantages import group_advantages
from seer_rl.errors import RewardError, TrainError
from seer_rl.responses import Response
from seer_rl.trainer import Sample, Trainer

__all__ = ["Response", "RewardError", "Sample", "TrainError", "Trainer", "group_advantages"]
