"""The one name for verl's config: ``rollout.agent.agent_loop_manager_class``."""

from __future__ import annotations

from typing import Any

from seer_host.off_switch import is_off
from verl.utils.ray_utils import auto_await

from seer_core.errors import ConfigError
from seer_verl.check import OWN
from seer_verl.settings import kept_settings_of

__all__ = ["AgentLoopManager"]


class AgentLoopManager:
    """Makes the manager of agent loops for verl's trainer, by its config."""

    @classmethod
    @auto_await
    async def create(cls, config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return Seer's manager for the trainer that the config names; or verl's own, where Seer is off.

        Raises:
            ValueError: the config asks for what Seer cannot give.
        """
        v1 = bool(config.trainer.use_v1)
        mode = mode_of(config)
        if mode == "off":
            return await (_stock_tq() if v1 else _stock()).create(config, *args, **kwargs)
        if v1:
            from seer_verl.agent_loop_tq import AgentLoopManager as TransferQueueManager

            return await TransferQueueManager.create(config, *args, **kwargs)
        from seer_verl.agent_loop import AgentLoopManager as BatchManager

        return await BatchManager.create(config, *args, **kwargs)


def mode_of(config: Any) -> str:
    """Return whether Seer is ``on``, ``off``, or a ``shadow``: ``SEER`` in the environment, or the config.

    Raises:
        ValueError: they are none.
    """
    rollout = config.actor_rollout_ref.rollout
    try:
        off = is_off()
    except ConfigError as error:
        raise ValueError(str(error)) from None
    if rollout.name == OWN:
        if off:
            raise ValueError(
                "SEER=off, and rollout.name is seer: without Seer name verl's own vllm or sglang"
            )
        return "on"
    return "off" if off else kept_settings_of(rollout).mode


def _stock() -> Any:
    from verl.experimental.agent_loop import AgentLoopManager as Stock

    return Stock


def _stock_tq() -> Any:
    from verl.trainer.ppo.v1 import AgentLoopManagerTQ

    return AgentLoopManagerTQ
