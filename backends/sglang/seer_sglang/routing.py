"""Routed experts of chunks: SGLang keeps those of each KV slot, and has them for a request when it ends."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from seer_host.routed_experts import ROUTED_EXPERTS, packed
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.schedule_batch import Req
from sglang.srt.mem_cache.pool_host.common import ALLOC_MEMORY_FUNCS
from sglang.srt.state_capturer.routed_experts import get_global_experts_capturer
from torch import Tensor

__all__ = ["RoutedExperts", "keep_in_plain_memory"]


def keep_in_plain_memory() -> None:
    """Have them kept in memory that is not pinned: on a CPU there is no device to pin it for."""
    ALLOC_MEMORY_FUNCS["cpu"] = _allocate


def _allocate(dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any) -> Tensor:
    return torch.empty(dims, dtype=dtype, device=device)


class RoutedExperts:
    """The experts of the tokens whose KV an engine has, if ``engine_args`` asks it for them.

    ``slots`` has those of each KV slot, int32 [slots, layers, experts per token], in the memory of the host.
    They belong to the KV: a pool that moves it moves them as well.
    """

    def __init__(self, scheduler: Any) -> None:
        self._capturer: Any = get_global_experts_capturer()
        self._rows = scheduler.req_to_token_pool
        self._kept: dict[str, Tensor] = {}
        if self._capturer is not None:
            _call_before_kv_goes(self._keep)
            self._follow(scheduler.token_to_kv_pool_allocator.get_kvcache())

    @property
    def on(self) -> bool:
        """Whether they are kept."""
        return self._capturer is not None

    @property
    def slots(self) -> list[Tensor]:
        """The experts of all slots, as one more layer of KV; none if they are not kept."""
        return [self._capturer.host_cache.buffer] if self.on else []

    def of(self, req: Req) -> dict[str, Any]:
        """Return the attachments of a chunk that has ended, or is about to."""
        if not self.on:
            return {}
        now = self._now(req) if req.routed_experts is None and req.kv.holds_kv else req.routed_experts
        found = self._kept.get(req.rid) if now is None else self._first(req, now)
        self.forget(req.rid)
        return {} if found is None else {ROUTED_EXPERTS: packed(found.numpy(), req.routed_experts_start_len)}

    def forget(self, rid: str) -> None:
        """Forget a request that was dropped."""
        self._kept.pop(rid, None)

    def _follow(self, pool: Any) -> None:
        """Have them move with the KV of accepted drafts, which SGLang puts where rejected ones were."""
        move: Callable[[Tensor, Tensor], None] = pool.move_kv_cache
        [experts] = self.slots

        def moved(to: Tensor, of: Tensor) -> None:
            move(to, of)
            experts[to.to(experts.device)] = experts[of.to(experts.device)]

        pool.move_kv_cache = moved

    def _keep(self, req: Req) -> None:
        """Keep those of a request that leaves its KV, and may come back or be over."""
        self._kept[req.rid] = self._first(req, self._now(req))

    def _first(self, req: Req, now: Tensor) -> Tensor:
        """Return those of the first time that each position was computed: tokens were drawn with these."""
        kept = self._kept.get(req.rid)
        return now if kept is None else torch.cat([kept, now[len(kept) :]])

    def _now(self, req: Req) -> Tensor:
        size = len(req.origin_input_ids) + len(req.output_ids_through_stop)
        found: Tensor = self._capturer.get_topk(
            req.kv.req_pool_idx, size, self._rows, req.routed_experts_start_len
        )
        return found


def _call_before_kv_goes(keep: Callable[[Req], None]) -> None:
    """Have ``keep`` called with each request that SGLang is about to put back into its queue."""
    release: Callable[..., bool] = schedule_batch.release_req

    def kept(*, req: Req, **named: Any) -> bool:
        keep(req)
        return release(req=req, **named)

    schedule_batch.release_req = kept
