"""Routed experts of chunks: kept for each slot of KV, so that they are wherever the KV is.

vLLM's second model runner captures the experts of each step's tokens, and hands them to its auxiliary output
connector, which keeps them by the hashes of blocks.  ``SlotExperts`` takes its place: a block that comes from
a pool, or out of the prefix cache, then has the experts with which it was computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from seer_host.routed_experts import ROUTED_EXPERTS, packed

from seer_vllm.kv_groups import whole_group

if TYPE_CHECKING:
    from numpy.typing import NDArray
    from vllm.config import VllmConfig
    from vllm.v1.request import Request

__all__ = [
    "EXPERTS_FROM",
    "WITH_EXPERTS",
    "RequestExperts",
    "SlotExperts",
    "bytes_of_experts",
    "experts_move",
]

EXPERTS_FROM = "experts_from"
"""The key of ``extra_args`` under which a request has the first position whose experts are wanted."""

WITH_EXPERTS = "with_experts"
"""The key of ``kv_connector_extra_config`` whose value is whether experts move with the KV."""


def experts_move(config: VllmConfig) -> bool:
    """Return whether experts move with the KV."""
    transfer = config.kv_transfer_config
    return transfer is not None and bool(transfer.get_from_extra_config(WITH_EXPERTS, False))


def bytes_of_experts(config: VllmConfig) -> int:
    """Return the bytes that the experts of a token take, those of all layers."""
    model = config.model_config
    size = 1 if model.get_num_experts() <= 256 else 2
    return model.get_total_num_hidden_layers() * model.get_num_experts_per_tok() * size


class SlotExperts:
    """The experts of a worker's KV; a model runner calls it after each step, as it would vLLM's connector.

    ``blocks`` has them, uint8 [blocks, tokens of a block, bytes of a token].
    """

    def __init__(self, runner: Any) -> None:
        theirs, kv = runner.aux_output_connector, runner.kv_cache_config
        theirs.close()
        self._capturer = theirs._capturer
        self._shape = self._capturer.shape_per_token
        self._dtype = np.dtype(self._capturer.output_dtype_name)
        self._mappings = runner.block_tables.slot_mappings
        self._group = whole_group(kv)
        tokens = kv.kv_cache_groups[self._group].kv_cache_spec.block_size
        size = bytes_of_experts(runner.vllm_config)
        self.blocks = torch.zeros((kv.num_blocks, tokens, size), dtype=torch.uint8, device=runner.device)
        self._slots = self.blocks.flatten(0, 1)

    def begin_step(self, metadata: None) -> None:
        """Do nothing; what vLLM's scheduler would send is for vLLM's own."""

    def prepare_output(self, batch: Any) -> None:
        """Keep the experts of a step's tokens; those of rejected drafts are written over later."""
        count = int(batch.query_start_loc_np[len(batch.req_ids)])
        experts = self._capturer.snapshot_routing_data(count)
        self._slots[self._mappings[self._group, :count]] = experts.view(torch.uint8).flatten(1)

    def close(self) -> None:
        """Do nothing; vLLM's own has a thread to end."""

    def read(self, block_ids: Sequence[int], first: int, count: int) -> NDArray[np.integer[Any]]:
        """Return the experts of so many tokens of blocks, from token ``first`` on, int [count, layers, k]."""
        wanted = self.blocks[torch.tensor(block_ids, device=self.blocks.device)]
        rows = wanted.flatten(0, 1)[first : first + count].cpu().numpy()
        found: NDArray[np.integer[Any]] = rows.view(self._dtype).reshape(count, *self._shape)
        return found


class RequestExperts:
    """Takes the experts of requests from the workers before their KV goes, for one of vLLM's schedulers.

    Those of a position that was computed twice are of the first time: tokens were drawn with these.  ``read``
    is ``SlotExperts.read`` of the workers.
    """

    def __init__(
        self, scheduler: Any, read: Callable[[Sequence[int], int, int], NDArray[np.integer[Any]]]
    ) -> None:
        scheduler.aux_output_connector = None  # it would want what vLLM's own connector answers
        self._read = read
        self._kv = scheduler.kv_cache_manager
        self._group = whole_group(scheduler.kv_cache_config)
        self._block_tokens = scheduler.kv_cache_config.kv_cache_groups[self._group].kv_cache_spec.block_size

    def keep(self, request: Request, kept: list[NDArray[np.integer[Any]]]) -> None:
        """Add to ``kept`` what is not there yet of a request that is about to lose its KV."""
        first = _first_wanted(request)
        end = request.num_computed_tokens
        if first is None or end < request.num_prompt_tokens:  # no token was drawn with any of it
            return
        begin = first + sum(map(len, kept))
        if begin < end:
            table = self._kv.get_block_ids(request.request_id)[self._group]
            skipped = begin // self._block_tokens
            blocks = table[skipped : -(-end // self._block_tokens)]
            kept.append(self._read(blocks, begin - skipped * self._block_tokens, end - begin))

    def of(self, request: Request, kept: Sequence[NDArray[np.integer[Any]]]) -> dict[str, Any]:
        """Return the attachments of a chunk that has ended; its last token is not computed any more."""
        first = _first_wanted(request)
        if first is None or not kept:
            return {}
        found = np.concatenate(kept)[: request.num_tokens - 1 - first]
        return {ROUTED_EXPERTS: packed(found, first)}


def _first_wanted(request: Request) -> int | None:
    params = request.sampling_params
    return ((params.extra_args if params else None) or {}).get(EXPERTS_FROM)
