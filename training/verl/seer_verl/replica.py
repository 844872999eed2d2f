"""The replicas that verl drives as its engines: sleep, wake and weights go to Seer's server."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from seer_client import AsyncClient, Client
from torch.distributed import get_rank, is_initialized
from verl.workers.rollout.base import BaseRollout
from verl.workers.rollout.replica import RolloutReplica

from seer_verl.llm_client import version_of
from seer_verl.settings import VerlSettings, settings_of

__all__ = ["Replica", "ReplicaRollout"]


class Replica(RolloutReplica):
    """One of verl's replicas; only the first makes calls to the server, however many engines that has."""

    async def launch_servers(self) -> None:
        """Launch nothing: ``seer serve`` has the engines."""
        self._server_address = settings_of(self.config).url

    async def init_colocated(self, resource_pool: Any) -> None:
        """Refuse: verl's reward models and teachers are not served."""
        raise ValueError("Seer serves the model that is trained alone; name other engines for reward models")

    async def init_standalone(self) -> None:
        """Refuse: verl would keep GPUs for it, and send weights in another way."""
        raise ValueError("Seer's rollouts are synchronous; set trainer.v1.trainer_mode to sync")

    async def sleep(self) -> None:
        """Have the engines free their memory while the trainer computes."""
        if self.replica_rank == 0 and self.config.free_cache_engine:
            await _sleep(settings_of(self.config))

    async def wake_up(self) -> None:
        """Have the engines take their memory back."""
        if self.replica_rank == 0 and self.config.free_cache_engine:
            await _wake(settings_of(self.config))


class ReplicaRollout(BaseRollout):
    """The rollout half of a trainer's worker: that of rank 0 sends the weights."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, *args: Any, **kwargs: Any) -> None:
        """Read where the server is; see verl's class for the arguments."""
        super().__init__(config, model_config, device_mesh, *args, **kwargs)
        self.settings = settings_of(self.config)
        self.sends_weights = not is_initialized() or get_rank() == 0
        self._sent: int | None = None

    async def resume(self, tags: list[str]) -> None:
        """Wake the engines before they get weights; they take all of their memory at once."""
        if self.sends_weights and "weights" in tags:
            await _wake(self.settings)

    async def release(self) -> None:
        """Have the engines free their memory."""
        if self.sends_weights:
            await _sleep(self.settings)

    async def update_weights(
        self,
        weights: Iterator[tuple[str, torch.Tensor]],
        wire_format: str = "named_tensors",
        peft_config: Any = None,
        global_steps: int | None = None,
        **_: Any,
    ) -> None:
        """Send named tensors to the server, which loads them as the version of a step.

        Every rank draws all of them, for gathering a tensor takes all ranks.  Nothing is sent if the server
        has them: verl also calls this to wake engines.

        Raises:
            ValueError: they are no whole tensors, or the server has newer weights.
            ClientError: the server refuses them, or is gone.
        """
        try:
            if wire_format != "named_tensors" or peft_config is not None:
                raise ValueError(
                    "Seer's engines load whole models; set model.lora.merge=True, or leave LoRA out"
                )
            if self.sends_weights:
                with Client(**self.settings.connection) as client:
                    self._send(client, weights, global_steps)
        finally:
            for _rest in weights:
                pass

    def _send(self, client: Client, weights: Iterator[tuple[str, torch.Tensor]], step: int | None) -> None:
        loaded = client.state().weight_version
        version = self._sent if step is None else version_of(step)
        if version is None:
            raise ValueError("weights come without a step, and none have come before; update them with one")
        if version == self._sent == loaded:
            return
        if loaded >= version:
            raise ValueError(
                f"the server at {self.settings.url} has weights of version {loaded}, and this training sends"
                f" version {version}; either another training uses it, or this one was resumed: start `seer"
                " serve` anew, with the same --journal"
            )
        send = client.share_weights if self.settings.is_local else client.send_weights
        send(weights, version=version, wait_s=self.settings.wait_s)
        self._sent = version


async def _sleep(settings: VerlSettings) -> None:
    async with AsyncClient(**settings.connection) as client:
        await client.sleep(wait_s=settings.wait_s)


async def _wake(settings: VerlSettings) -> None:
    async with AsyncClient(**settings.connection) as client:
        await client.wake()
