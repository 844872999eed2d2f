"""The client that takes the place of verl's, by whose engines are scheduled."""

from __future__ import annotations

from typing import Any

from seer_verl.check import OWN

__all__ = ["client_of"]


def client_of(config: Any, stock: Any) -> Any:
    """Return the client of a server of Seer's, or of verl's own servers in the place of ``stock``."""
    if config.actor_rollout_ref.rollout.name == OWN:
        from seer_verl.llm_client import LLMClient

        return LLMClient(config)
    from seer_verl.kept_client import KeptClient

    return KeptClient(config, stock)
