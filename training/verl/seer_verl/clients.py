"""The client that takes the place of verl's, by whose engines are scheduled."""

from __future__ import annotations

from typing import Any

from seer_verl.check import OWN
from seer_verl.settings import kept_settings_of

__all__ = ["client_of"]


def client_of(config: Any, stock: Any) -> Any:
    """Return the client of a server of Seer's, or of verl's own servers in the place of ``stock``."""
    if config.actor_rollout_ref.rollout.name == OWN:
        from seer_verl.llm_client import LLMClient

        return LLMClient(config)
    if kept_settings_of(config.actor_rollout_ref.rollout).mode == "shadow":
        from seer_verl.shadow_client import ShadowClient

        return ShadowClient(config, stock)
    from seer_verl.kept_client import KeptClient

    return KeptClient(config, stock)
