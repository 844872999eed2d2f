"""KV as blocks of bytes: the slots that hold some tokens in a row, over all layers."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool, MLATokenToKVPool
from torch import Tensor

from seer_core.errors import EngineError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    Bytes = NDArray[np.uint8]

__all__ = ["Layers"]

LEAST_BLOCK_TOKENS = 16
"""A pool's block is no smaller, whatever SGLang's page: a token's KV is too little to look after."""


class Layers:
    """The KV of all layers, where each slot holds one token.

    A block holds ``block_tokens`` tokens, and whole pages.

    Raises:
        EngineError: the KV is laid out otherwise.
    """

    def __init__(self, pool: Any) -> None:
        self._buffers = _buffers(pool)
        page = pool.page_size
        self.block_tokens: int = -(-LEAST_BLOCK_TOKENS // page) * page
        self.block_bytes = sum(self._part_bytes(buffer) for buffer in self._buffers)
        shapes = [(str(buffer.dtype), *buffer.shape[1:]) for buffer in self._buffers]
        self.layout = hashlib.sha256(repr((self.block_tokens, shapes)).encode()).hexdigest()
        """Stands for what the bytes of a block mean."""

    def read(self, slots: Tensor) -> Bytes:
        """Return the blocks that these slots hold, uint8 [slots / block_tokens, block_bytes]."""
        blocks = len(slots) // self.block_tokens
        parts = [buffer[slots].reshape(blocks, -1).view(torch.uint8) for buffer in self._buffers]
        read: Bytes = torch.cat(parts, 1).cpu().numpy()
        return read

    def write(self, slots: Tensor, blocks: Bytes) -> None:
        """Fill slots with the last tokens of blocks that ``read`` has returned, here or elsewhere."""
        begin, skipped = 0, len(blocks) * self.block_tokens - len(slots)
        for buffer in self._buffers:
            end = begin + self._part_bytes(buffer)
            part = torch.from_numpy(blocks[:, begin:end].copy()).to(buffer.device).view(buffer.dtype)
            buffer[slots] = part.view(-1, *buffer.shape[1:])[skipped:]
            begin = end

    def _part_bytes(self, buffer: Tensor) -> int:
        return self.block_tokens * buffer[0].nbytes


def _buffers(pool: Any) -> list[Tensor]:
    """Return the tensors of a pool of SGLang's, [slots, ...] each: keys and values, or latents, by layer."""
    buffers: list[Tensor] = []
    if type(pool) is MHATokenToKVPool and not pool.is_quantized_kv_cache:
        buffers = [*pool.k_buffer, *pool.v_buffer]
    elif type(pool) is MLATokenToKVPool:
        buffers = [*pool.kv_buffer]
    if not buffers or any(len(buffer) != pool.size + pool.page_size for buffer in buffers):
        raise EngineError(
            f"SGLang keeps the model's KV in a {type(pool).__name__}, not token by token in one kind of full"
            ' attention, and it cannot be pooled; set [seer].kv_pool = "none"'
        )
    return buffers
