"""Rolls out through ``seer serve``, from an environment that holds neither Seer nor its engines."""

from seer_client.async_client import AsyncClient
from seer_client.client import Client
from seer_client.protocol import ClientError, Completion, Progress, State

__all__ = ["AsyncClient", "Client", "ClientError", "Completion", "Progress", "State"]
