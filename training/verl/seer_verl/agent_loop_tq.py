"""The manager of agent loops for verl's newer trainer, whose workers leave responses in TransferQueue.

There a row of the batch is a prompt, and a worker rolls out its whole group.
"""

from __future__ import annotations

import asyncio
from typing import Any

import ray
from tensordict import NonTensorStack, TensorDict
from verl.trainer.ppo.v1 import agent_loop_tq as verls

from seer_verl.agent_loop import RowAware
from seer_verl.check import check
from seer_verl.clients import client_of
from seer_verl.rows import Names, iteration_of, reserved_record

__all__ = ["AgentLoopManager", "AgentLoopWorker"]

COLUMN = "seer_group"

VerlsWorker: Any = verls.AgentLoopWorkerTQ.__ray_metadata__.modified_class.__ray_actor_class__
"""verl's class itself: what stands under its name is Ray's handle of it, which cannot be subclassed."""


class AgentLoopWorker(RowAware, VerlsWorker):
    """verl's worker, whose prompts are reserved groups until their responses are over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do what verl's does, whose ``super()`` does not survive that Ray copies its class."""
        verls.AgentLoopWorker.__init__(self, *args, **kwargs)
        verls.tq.init()
        self.background_tasks: set[asyncio.Task[Any]] = set()
        self._batches: dict[str, str] = {}
        """The batch of each group under way."""

    def place(self, kwargs: dict[str, Any]) -> tuple[str, str, int]:
        """Remove the group from the arguments of an agent loop, whose responses verl has numbered."""
        group = kwargs.pop(COLUMN)
        return self._batches.get(group, ""), group, kwargs["session_id"]

    async def generate_sequences(self, batch: TensorDict) -> None:
        """Reserve the groups of this worker's prompts, and begin their loops; see verl's method.

        Raises:
            ClientError: a server of Seer's refuses them, or is gone.
        """
        validate, step = "validate" in batch and batch["validate"], batch["global_steps"]
        groups = self._groups(batch, validate)
        reservation = self.llm_client.reserved(groups, iteration_of(step, validate))
        batch_id = await reservation.__aenter__()
        self._batches |= {each["group_id"]: batch_id for each in groups}
        others = set(self.background_tasks)
        try:
            await super().generate_sequences(batch)
        finally:
            closing = asyncio.create_task(self._close(reservation, groups, self.background_tasks - others))
            self.background_tasks.add(closing)
            closing.add_done_callback(self.background_tasks.discard)

    async def _close(
        self, reservation: Any, groups: list[dict[str, Any]], tasks: set[asyncio.Task[Any]]
    ) -> None:
        """End a reservation when its loops are over; what they have not requested is given up."""
        if tasks:
            await asyncio.wait(tasks)
        for each in groups:
            self._batches.pop(each["group_id"], None)
        await reservation.__aexit__(None, None, None)

    def _groups(self, batch: TensorDict, validate: bool) -> list[dict[str, Any]]:
        config = self.config.actor_rollout_ref.rollout
        usual = config.val_kwargs.n if validate else config.n
        sizes = [usual] * len(batch)
        if "__rollout_n__" in batch:
            sizes = list(batch["__rollout_n__"])
        agents = config.agent.default_agent_loop
        if "agent_name" in batch:
            agents = batch["agent_name"]
        if isinstance(agents, str):
            agents = [agents] * len(batch)
        rows = zip(batch[COLUMN], sizes, agents, strict=True)
        return [reserved_record(name, int(n), str(agent)) for name, n, agent in rows]


class AgentLoopManager(verls.AgentLoopManagerTQ):
    """verl's manager, whose requests Seer schedules; see ``seer_verl.manager``."""

    def __init__(self, config: Any, llm_client: Any = None, *args: Any, **kwargs: Any) -> None:
        """Put Seer's client in the place of verl's; see verl's class for the arguments.

        Raises:
            ValueError: the config asks for what Seer's rollouts cannot give.
        """
        check(config)
        super().__init__(config, client_of(config, llm_client), *args, **kwargs)
        self.agent_loop_workers_class = ray.remote(AgentLoopWorker)
        self.names = Names()

    def generate_sequences(self, prompts: TensorDict) -> None:
        """Begin to roll out a batch of prompts, each with its group; see verl's method.

        Raises:
            ClientError: a server of Seer's refuses the batch, or is gone.
        """
        validate, step = "validate" in prompts and prompts["validate"], prompts["global_steps"]
        prompts[COLUMN] = NonTensorStack(*self.names.take(len(prompts), step, validate))
        super().generate_sequences(prompts)
