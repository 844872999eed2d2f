"""TRL's GRPOTrainer on Seer's rollouts: ``GRPOTrainer(..., rollout_func=SeerRollout(session))``."""

from seer_trl.rollout import SeerRollout

__all__ = ["SeerRollout"]
