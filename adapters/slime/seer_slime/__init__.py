"""slime's training on Seer's rollouts: ``--rollout-function-path seer_slime.generate_rollout``."""

from seer_slime.rollout import generate_rollout

__all__ = ["generate_rollout"]
