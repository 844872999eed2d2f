"""SkyRL's training on Seer's rollouts: ``python -m seer_skyrl seer_config=rollout.toml ...``."""

from seer_skyrl.engines import SeerEngines
from seer_skyrl.training import SeerConfig, SeerExp, SeerGenerator, SeerTrainer

__all__ = ["SeerConfig", "SeerEngines", "SeerExp", "SeerGenerator", "SeerTrainer"]
