"""KV of a stock ``vllm serve`` in a pool of Seer's runtime.

Named by the flag that ``FLAG`` is.  It does nothing until a runtime has attached a store (``served_core``),
and leaves other clients' requests alone.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import attrs
from msgspec import structs
from seer_worker.process.account import RequestStats
from seer_worker.process.pooling import AWAITED_BYTES
from seer_worker.served import ServedCost, read_job

from seer_vllm.connector import Loads, StoreConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["FLAG", "SeerConnector"]

FLAG = (
    '--kv-transfer-config \'{"kv_connector": "SeerConnector", "kv_connector_module_path":'
    ' "seer_vllm.served_kv", "kv_role": "kv_both"}\''
)


@attrs.define(eq=False)
class KeyChain:
    """The hashes of a request's tokens, each of which stands for all tokens before its end, too."""

    root: bytes | None
    """None: the request shares nothing."""
    keys: list[bytes] = attrs.field(factory=list)


@attrs.define(eq=False)
class ServedStats(RequestStats):
    """The account of a request, and the drafts of its last step with the tokens that it had before."""

    request: Request = attrs.field(kw_only=True)
    drafts: Sequence[int] = ()
    before: int = 0

    def settle(self) -> None:
        """Book what became of the last step's drafts."""
        drafts, self.drafts = self.drafts, ()
        kept = self.request.num_output_tokens - self.before
        if drafts and 0 < kept <= len(drafts) + 1:
            self.verified(drafts, kept, self.request.output_token_ids[-1])


class SeerConnector(StoreConnector):
    """A ``StoreConnector`` whose keys are the same on all servers that ``share`` by one name.

    vLLM's own keys begin at random on each server, and with the salt of a request; these begin at the name,
    which is of a model and of a version of its weights, and at the kind of KV.  A request keeps the name
    under which it was let in first: once that is another, or if there was none, it shares nothing.
    """

    saves_aborted = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.use_block_bytes(self.block_bytes, AWAITED_BYTES)
        self._root: bytes | None = None
        self._chains: dict[str, KeyChain] = {}
        self._stats: dict[str, ServedStats] = {}

    @property
    def shares(self) -> bool:
        """Whether anything is saved or loaded now."""
        return self._root is not None

    def share(self, name: str | None) -> None:
        """Share KV under a name from now on; without one share none."""
        self._root = None if name is None else hashlib.sha256(f"{name} {self.parts.kind}".encode()).digest()
        self._running.clear()
        for request_id in self._chains:
            self.requests.take(request_id)
        self._staged_keys.clear()
        self.requests.reset()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``StoreConnector``; nothing is loaded for other clients' requests."""
        if not self._job(request):
            return 0, False
        self._stats.setdefault(request.request_id, ServedStats(request=request))
        chain = self._chains.setdefault(request.request_id, KeyChain(self._root))
        if chain.root is None or chain.root != self._root:
            return 0, False
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, num_external_tokens: int
    ) -> None:
        """See ``StoreConnector``."""
        stats = self._stats.get(request.request_id)
        if stats is not None and num_external_tokens and not request.num_preemptions:
            stats.pool_tokens = num_external_tokens
        super().update_state_after_alloc(request, blocks, num_external_tokens)

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> Loads:
        """See ``StoreConnector``; note the drafts of the step."""
        for stats in self._stats.values():
            stats.settle()
        for request_id, drafts in scheduler_output.scheduled_spec_decode_tokens.items():
            if request_id in self._stats:
                stats = self._stats[request_id]
                stats.drafts, stats.before = drafts, stats.request.num_output_tokens
        return super().build_connector_meta(scheduler_output)

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """See ``StoreConnector``; a chunk that is aborted by its id goes on elsewhere, so it is saved too.

        Return what the chunk has cost, for its answer.
        """
        try:
            delayed, _ = super().request_finished_all_groups(request, block_ids)
        finally:
            self._chains.pop(request.request_id, None)
            stats = self._stats.pop(request.request_id, None)
        if stats is None:
            return delayed, None
        stats.settle()
        steps = request.num_output_tokens - stats.spared_steps
        cost = ServedCost(stats.pool_tokens, steps, stats.drafted_at, stats.accepted_at)
        return delayed, {"seer": structs.asdict(cost)}

    def _save(self, request: Request, tables: Sequence[Sequence[int]]) -> int:
        """See ``StoreConnector``; a request that shares nothing has no keys."""
        return super()._save(request, tables) if self._keys(request) else 0

    def _job(self, request: Request) -> dict[str, Any]:
        params = request.sampling_params
        other = request.lora_request is not None or request.mm_features or request.prompt_embeds is not None
        job = None if params is None or other else read_job(params.extra_args)
        return {} if job is None else structs.asdict(job)

    def _keys(self, request: Request) -> Sequence[bytes]:
        chain = self._chains.get(request.request_id)
        if chain is None or chain.root is None or chain.root != self._root:
            return ()
        keys, size = chain.keys, self.groups.hash_tokens
        tokens = request.all_token_ids
        for begin in range(len(keys) * size, request.num_tokens // size * size, size):
            block = array("i", tokens[begin : begin + size])
            keys.append(hashlib.sha256((keys[-1] if keys else chain.root) + block.tobytes()).digest())
        return keys
