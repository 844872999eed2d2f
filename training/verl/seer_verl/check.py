"""Refuses settings of verl that Seer's rollouts do not support."""

from __future__ import annotations

from typing import Any

__all__ = ["KEPT", "OWN", "check"]

OWN = "seer"
"""The ``rollout.name`` with which engines are Seer's own."""

KEPT = ("vllm", "sglang")
"""Those with which verl starts and keeps its own engines, and Seer schedules over them."""


def check(config: Any) -> None:
    """Make sure that verl's config asks for what Seer can give.

    Raises:
        ValueError: it does not, and what to change.
    """
    rollout = config.actor_rollout_ref.rollout
    if config.trainer.use_v1 and config.trainer.v1.trainer_mode != "sync":
        raise ValueError(
            f"Seer's rollouts are synchronous, and trainer.v1.trainer_mode is"
            f" {config.trainer.v1.trainer_mode}; set it to sync"
        )
    if rollout.name == OWN:
        _check_own(rollout)
    elif rollout.name not in KEPT:
        raise ValueError(
            f"rollout.name is {rollout.name}; Seer schedules over verl's own {' and '.join(KEPT)}, or over"
            f" engines of its own with {OWN}"
        )
    elif rollout.disaggregation.enabled:
        raise ValueError(
            "rollout.disaggregation is enabled, whose servers hand requests on to each other; disable it, or"
            " set engine_kwargs.seer.mode=off"
        )


def _check_own(rollout: Any) -> None:
    """Make sure of the same where engines are Seer's own."""
    if rollout.checkpoint_engine.backend != "naive":
        raise ValueError(
            f"rollout.checkpoint_engine.backend is {rollout.checkpoint_engine.backend}, and Seer's server"
            " gets its weights from the trainer's workers themselves; set it to naive"
        )
    sampling = rollout.temperature, rollout.top_p, max(rollout.top_k, 0)
    if rollout.calculate_log_probs and sampling != (1.0, 1.0, 0):
        raise ValueError(
            f"at temperature {sampling[0]:g}, top_p {sampling[1]:g} and top_k {sampling[2]} the engines'"
            " log-probs, the model's own, are not those that verl compares with; sample at 1, 1 and -1, or"
            " set rollout.calculate_log_probs=False"
        )
