"""slime's training on Seer's rollouts: ``--rollout-function-path seer_slime.generate_rollout``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from seer_slime.rollout import generate_rollout

__all__ = ["generate_rollout"]


def __getattr__(name: str) -> Any:
    """Import the hook, and with it slime, on first use: ``seer doctor`` reports where slime is missing."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from seer_slime import rollout

    return getattr(rollout, name)
