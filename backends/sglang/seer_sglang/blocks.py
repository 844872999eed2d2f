"""KV as blocks of bytes: the slots that hold some tokens in a row, over all layers.

On their way out of a GPU they go through pairs of buffers, on a stream of their own, so that a step computes
meanwhile.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import numpy as np
import torch
from seer_worker.process.copy_buffers import STAGED_BYTES, CopyBuffers
from torch import Tensor

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes

__all__ = ["SglangLayers"]

LEAST_BLOCK_TOKENS = 16
"""A pool's block is no smaller, for any page of SGLang's: the KV of a token is too little for a key."""


class SglangLayers:
    """The KV of all layers, [slots, ...] each, where each slot holds one token.

    What else belongs to each slot, such as the experts that computed it, may stand among them, also in the
    memory of the host.

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
        self.most_staged = max(1, STAGED_BYTES // self.block_bytes)
        """The blocks that ``stage`` takes at most."""
        self.staged_from = self.most_staged // 2
        """Full blocks of running chunks are staged once there are so many."""
        device = layers[0].device
        self._out, self._put = (CopyBuffers(device, self.most_staged, self.block_bytes) for _ in range(2))
        self._staged = torch.empty(0)

    def stage_from_half_of(self, blocks: int) -> None:
        """Stage once half of these are full, as many as a request loads without a wait, or half a buffer."""
        self.staged_from = min(self.most_staged, blocks) // 2

    def stage(self, slots: Tensor) -> None:
        """Begin to copy out the blocks that these slots hold, at most ``most_staged``; see ``take``.

        No step may write the slots until then.
        """
        self._out, self._put = self._put, self._out
        out, count = self._out, len(slots) // self.block_tokens
        self._staged = slots  # whose memory a GPU would use again before the copy has been made
        if out.stream is not None:
            out.stream.wait_stream(torch.cuda.current_stream(slots.device))
        with out.apart():
            for layer, begin, end in self._columns():
                rows = layer[slots.to(layer.device)]
                out.there[:count, begin:end] = rows.reshape(count, -1).view(torch.uint8)
            if out.stream is not None:
                out.host[:count].copy_(out.there[:count], non_blocking=True)

    def take(self) -> Bytes:
        """Return what was staged, uint8 [n, block_bytes]; it stays until twice as much is staged."""
        self._out.wait()
        blocks: Bytes = self._out.host[: len(self._staged) // self.block_tokens].numpy()
        return blocks

    def read(self, slots: Tensor) -> Bytes:
        """Return the blocks that these slots hold, uint8 [slots / block_tokens, block_bytes]."""
        blocks = np.empty((len(slots) // self.block_tokens, self.block_bytes), np.uint8)
        for begin in range(0, len(blocks), self.most_staged):
            part = blocks[begin : begin + self.most_staged]
            self.stage(slots[begin * self.block_tokens :][: len(part) * self.block_tokens])
            part[:] = self.take()
        return blocks

    def write(self, slots: Tensor, blocks: Bytes) -> None:
        """Fill slots with the last tokens of blocks that ``read`` has returned, here or elsewhere."""
        skipped = len(blocks) * self.block_tokens - len(slots)
        for layer, begin, end in self._columns():
            part = torch.from_numpy(blocks[:, begin:end].copy()).to(layer.device).view(layer.dtype)
            layer[slots.to(layer.device)] = part.view(-1, *layer.shape[1:])[skipped:]

    def _columns(self) -> Iterator[tuple[Tensor, int, int]]:
        """Yield each layer, and from where to where it lies in a block."""
        begin = 0
        for layer in self._layers:
            end = begin + self._part_bytes(layer)
            yield layer, begin, end
            begin = end

    def _part_bytes(self, layer: Tensor) -> int:
        return self.block_tokens * layer[0].nbytes
