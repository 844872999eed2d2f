"""The manager of verl's agent loops: a batch's groups are named to Seer, then verl's own workers run them.

This one is for ``trainer.use_v1=False``; ``seer_verl.agent_loop_tq`` has that of verl's newer trainer.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import ray
from verl.experimental import agent_loop as verls
from verl.protocol import DataProto
from verl.utils.ray_utils import auto_await
from verl.workers.rollout.utils import get_vision_placeholder_token_ids

from seer_verl.check import check
from seer_verl.clients import client_of
from seer_verl.rows import ROW, BatchRow, Names, iteration_of, places, reserved_record

__all__ = ["AgentLoopManager", "AgentLoopWorker", "RowAware"]

COLUMN = "seer_row"


class RowAware:
    """A worker that sets the row of each agent loop before it runs, with tools or without."""

    processor: Any

    def place(self, kwargs: dict[str, Any]) -> tuple[str, str, int]:
        """Remove the row's batch, group and index from the arguments of its agent loop, and return them."""
        batch, group, index = kwargs.pop(COLUMN)
        return batch, group, index

    async def _run_agent_loop(
        self, sampling_params: dict[str, Any], trajectory: dict[str, Any], **kwargs: Any
    ) -> Any:
        batch, group, index = self.place(kwargs)
        iteration = iteration_of(trajectory["step"], trajectory["validate"])
        never = get_vision_placeholder_token_ids(self.processor)
        ROW.set(BatchRow(group, index, iteration, kwargs["agent_name"], batch=batch, never_written=never))
        return await super()._run_agent_loop(sampling_params, trajectory, **kwargs)  # type: ignore[misc]

    async def _agent_loop_postprocess(self, output: Any, validate: bool, **kwargs: Any) -> Any:
        """Mark a response if any of its turns was written without Seer; verl's loops mark it by the first."""
        row = ROW.get()
        if row is not None and row.without:
            for each in output if isinstance(output, list) else [output]:
                each.extra_fields["seer_fallback"] = True
        return await super()._agent_loop_postprocess(output, validate, **kwargs)  # type: ignore[misc]


class AgentLoopWorker(RowAware, verls.AgentLoopWorker):
    """verl's worker, each of whose rows is one of a reserved group."""


class AgentLoopManager(verls.AgentLoopManager):
    """verl's manager, whose requests Seer schedules; see ``seer_verl.manager``."""

    def __init__(self, config: Any, llm_client: Any = None, *args: Any, **kwargs: Any) -> None:
        """Put Seer's client in the place of verl's; see verl's class for the arguments.

        Raises:
            ValueError: the config asks for what Seer's rollouts cannot give.
        """
        check(config)
        self.agent_loop_workers_class = ray.remote(AgentLoopWorker)
        self.names = Names()
        super().__init__(config, client_of(config, llm_client), *args, **kwargs)

    @auto_await
    async def generate_sequences(self, prompts: DataProto) -> DataProto:
        """Roll out a batch whose rows of one ``uid`` are a group; see verl's method.

        Raises:
            ClientError: a server of Seer's refuses the batch, or is gone.
        """
        validate = prompts.meta_info.get("validate", False)
        step = prompts.meta_info.get("global_steps", -1)
        rows = self._rows(prompts, validate, step)
        sizes = Counter(group for group, _ in rows)
        names = prompts.non_tensor_batch.get("agent_name", [self.llm_client.usual_agent] * len(rows))
        agents = {group: str(agent) for (group, _), agent in zip(rows, names, strict=True)}
        groups = [reserved_record(name, n, agents[name]) for name, n in sizes.items()]
        try:
            async with self.llm_client.reserved(groups, iteration_of(step, validate)) as batch:
                column = np.empty(len(rows), dtype=object)
                column[:] = [(batch, *row) for row in rows]
                prompts.non_tensor_batch[COLUMN] = column
                output = await super().generate_sequences(prompts)
        finally:
            prompts.non_tensor_batch.pop(COLUMN, None)
        output.non_tensor_batch.pop(COLUMN, None)
        return output

    def _rows(self, prompts: DataProto, validate: bool, step: int) -> list[tuple[str, int]]:
        """Return each row's group and index; greedy ones, REMAX's, are a group of their own."""
        count = len(prompts)
        columns = prompts.non_tensor_batch
        uids = columns.get("uid", range(count))
        sampled = columns.get("__do_sample__", [True] * count)
        found = places((uid, bool(each)) for uid, each in zip(uids, sampled, strict=True))
        names = self.names.take(1 + max((group for group, _ in found), default=-1), step, validate)
        return [(names[group], index) for group, index in found]
