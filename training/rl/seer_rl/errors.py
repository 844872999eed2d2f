"""Errors of training, beside those of a rollout."""

from __future__ import annotations

from seer_core import SeerError

__all__ = ["RewardError", "TrainError"]


class TrainError(SeerError):
    """Training cannot go on, and would be wrong if it did.

    Remedy: mend the cause that the message names, and go on from the last checkpoint with ``seer train
    --resume``.
    """


class RewardError(SeerError):
    """One response has no reward: its function raised, hung, or died.

    Remedy: mend the reward function, or raise ``[train.rewards].timeout_s``.
    """
