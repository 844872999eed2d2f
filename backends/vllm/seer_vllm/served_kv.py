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
from seer_worker.process.pooling import AWAITED_BYTES
from seer_worker.served import read_job

from seer_vllm.connector import StoreConnector

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
    from vllm.v1.kv_cache_interface import KVCacheConfig
    from vllm.v1.request import Request

__all__ = ["FLAG", "SeerConnector"]

FLAG = (
    '--kv-transfer-config \'{"kv_connector": "SeerConnector", "kv_connector_module_path":'
    ' "seer_vllm.served_kv", "kv_role": "kv_both"}\''
)


@attrs.define(eq=False)
class KeyChain:
    """The keys of a request's full blocks, each of which stands for all tokens before its end, too."""

    root: bytes
    keys: list[bytes] = attrs.field(factory=list)


class SeerConnector(StoreConnector):
    """A ``StoreConnector`` whose keys are the same on all servers that ``share`` by one name.

    vLLM's own keys begin at random on each server, and with the salt of a request; these begin at the name,
    which is of a model and of a version of its weights.  A request keeps its beginning: one that has run
    under two names shares nothing.
    """

    saves_aborted = True

    def __init__(
        self, vllm_config: VllmConfig, role: KVConnectorRole, kv_cache_config: KVCacheConfig
    ) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.use_block_bytes(self.block_bytes, AWAITED_BYTES)
        self._root: bytes | None = None
        self._chains: dict[str, KeyChain] = {}

    @property
    def shares(self) -> bool:
        """Whether anything is saved or loaded now."""
        return self._root is not None

    def share(self, name: str | None) -> None:
        """Share KV under a name from now on; without one share none."""
        self._root = None if name is None else hashlib.sha256(name.encode()).digest()
        self._running.clear()
        for request_id in self._chains:
            self.requests.take(request_id)
        self._staged_keys.clear()
        self.requests.reset()

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """See ``StoreConnector``; nothing is loaded for other clients' requests."""
        if self._root is None or not self._job(request):
            self._chains.pop(request.request_id, None)
            return 0, False
        chain = self._chains.get(request.request_id)
        if chain is None or chain.root != self._root:
            self._chains[request.request_id] = KeyChain(self._root)
        return super().get_num_new_matched_tokens(request, num_computed_tokens)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """See ``StoreConnector``; a chunk that is aborted by its id goes on elsewhere, so it is saved too."""
        try:
            return super().request_finished(request, block_ids)
        finally:
            self._chains.pop(request.request_id, None)

    def _job(self, request: Request) -> dict[str, Any]:
        params = request.sampling_params
        other = request.lora_request is not None or request.mm_features or request.prompt_embeds is not None
        job = None if params is None or other else read_job(params.extra_args)
        return {} if job is None else structs.asdict(job)

    def _keys(self, request: Request) -> Sequence[bytes]:
        chain = self._chains.get(request.request_id)
        if chain is None or chain.root != self._root:
            return ()
        keys, size = chain.keys, self.block_tokens
        tokens = request.all_token_ids
        for begin in range(len(keys) * size, request.num_tokens // size * size, size):
            block = array("i", tokens[begin : begin + size])
            keys.append(hashlib.sha256((keys[-1] if keys else chain.root) + block.tobytes()).digest())
        return keys
