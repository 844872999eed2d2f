"""SkyRL's training on Seer's rollouts: ``python -m seer_skyrl seer_config=rollout.toml ...``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer_skyrl.engines import SeerEngines
    from seer_skyrl.training import SeerConfig, SeerExp, SeerGenerator, SeerTrainer

__all__ = ["SeerConfig", "SeerEngines", "SeerExp", "SeerGenerator", "SeerTrainer"]


def __getattr__(name: str) -> Any:
    """Import the class, and with it SkyRL, on first use: ``seer doctor`` reports where SkyRL is missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from seer_skyrl import engines, training

    return getattr(engines if name == "SeerEngines" else training, name)
