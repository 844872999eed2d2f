"""Refuses settings of verl that Seer's rollouts do not support."""

from __future__ import annotations

from typing import Any

__all__ = ["check"]


def check(config: Any, *, v1: bool) -> None:
    """Make sure that verl's config asks for what Seer can give, and names the manager of its trainer.

    Raises:
        ValueError: it does not, and what to change.
    """
    rollout = config.actor_rollout_ref.rollout
    if bool(config.trainer.use_v1) is not v1:
        right = "agent_loop_tq" if config.trainer.use_v1 else "agent_loop"
        raise ValueError(
            f"trainer.use_v1 is {config.trainer.use_v1}; set rollout.agent.agent_loop_manager_class to"
            f" seer_verl.{right}.AgentLoopManager"
        )
    if v1 and config.trainer.v1.trainer_mode != "sync":
        raise ValueError(
            f"Seer's rollouts are synchronous, and trainer.v1.trainer_mode is"
            f" {config.trainer.v1.trainer_mode}; set it to sync"
        )
    if rollout.name != "seer":
        raise ValueError(f"rollout.name is {rollout.name}, which starts engines of verl's; set it to seer")
    if rollout.checkpoint_engine.backend != "naive":
        raise ValueError(
            f"rollout.checkpoint_engine.backend is {rollout.checkpoint_engine.backend}, and Seer's server"
            " gets its weights from the trainer's workers themselves; set it to naive"
        )
    if rollout.enable_rollout_routing_replay:
        raise ValueError(
            "Seer's rollouts return no routes of experts; leave enable_rollout_routing_replay out"
        )
    sampling = rollout.temperature, rollout.top_p, max(rollout.top_k, 0)
    if rollout.calculate_log_probs and sampling != (1.0, 1.0, 0):
        raise ValueError(
            f"at temperature {sampling[0]:g}, top_p {sampling[1]:g} and top_k {sampling[2]} the engines'"
            " log-probs, the model's own, are not those that verl compares with; sample at 1, 1 and -1, or"
            " set rollout.calculate_log_probs=False"
        )
