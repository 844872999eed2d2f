"""KV as blocks of bytes: the slots that hold some tokens in a row, over all layers."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes

__all__ = ["SglangLayers"]

LEAST_BLOCK_TOKENS = 16
"""A pool's block is no smaller, for any page of SGLang's: the KV of a token is too little for a key."""


class SglangLayers:
    """The KV of all layers, [slots, ...] each, where each slot holds one token.

    A block holds ``block_tokens`` tokens: whole pages.

    Raises:
        EngineError: there are none.
    """

    def __init__(self, layers: Sequence[Tensor], page_tokens: int) -> None:
        if not layers:
            raise EngineError(
                "SGLang keeps the model's KV otherwise than token by token in full attention, so no pool can"
                ' have it; set [seer].kv_pool = "none"'
            )
        self._layers = layers
        self.block_tokens = -(-LEAST_BLOCK_TOKENS // page_tokens) * page_tokens
        self.block_bytes = sum(self._part_bytes(layer) for layer in layers)
        shapes = [(str(layer.dtype), *layer.shape[1:]) for layer in layers]
        self.layout = hashlib.sha256(repr((self.block_tokens, shapes)).encode()).hexdigest()
        """Stands for what the bytes of a block mean."""

    def read(self, slots: Tensor) -> Bytes:
        """Return the blocks that these slots hold, uint8 [slots / block_tokens, block_bytes]."""
        blocks = len(slots) // self.block_tokens
        parts = [layer[slots].reshape(blocks, -1).view(torch.uint8) for layer in self._layers]
        read: Bytes = torch.cat(parts, 1).cpu().numpy()
        return read

    def write(self, slots: Tensor, blocks: Bytes) -> None:
        """Fill slots with the last tokens of blocks that ``read`` has returned, here or elsewhere."""
        begin, skipped = 0, len(blocks) * self.block_tokens - len(slots)
        for layer in self._layers:
            end = begin + self._part_bytes(layer)
            part = torch.from_numpy(blocks[:, begin:end].copy()).to(layer.device).view(layer.dtype)
            layer[slots] = part.view(-1, *layer.shape[1:])[skipped:]
            begin = end

    def _part_bytes(self, layer: Tensor) -> int:
        return self.block_tokens * layer[0].nbytes
