"""KV as blocks of bytes, for any order in which a kernel keeps the numbers within a block.

Between a GPU and main memory blocks go through two buffers, taken once: one on the device, in which those of
all layers lie side by side, and a pinned one, to and from which the GPU copies by itself.  They go on a
stream of their own, so that a step computes meanwhile.  On a CPU the two are one buffer of plain memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext

import numpy as np
import torch

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes

__all__ = ["STAGED_BYTES", "VllmLayers"]

STAGED_BYTES = 32 << 20
"""The size of each buffer, if a block is not larger: a millisecond's copy at 32 GB/s."""


class VllmLayers:
    """The KV of all layers; a block of all of them is one row of bytes."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        self._rows = [_rows(name, layer, blocks) for name, layer in kv_caches.items()]
        self._device = self._rows[0].device
        block_bytes = sum(rows.shape[1] for rows in self._rows)
        self.most_staged = max(1, STAGED_BYTES // block_bytes)
        """The blocks that ``stage`` takes at most."""
        on_gpu = self._device.type == "cuda"
        shape = self.most_staged, block_bytes
        self._host = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu)
        self._there = torch.empty(shape, dtype=torch.uint8, device=self._device) if on_gpu else self._host
        self._stream = torch.cuda.Stream(self._device) if on_gpu else None  # type: ignore[no-untyped-call]
        self._staged = 0

    def stage(self, block_ids: Sequence[int]) -> None:
        """Begin to copy out blocks that no step writes any more, at most ``most_staged``; see ``take``."""
        self._staged = count = len(block_ids)
        if not count:
            return
        with self._apart():
            index = torch.tensor(block_ids, device=self._device)
            for rows, begin, end in self._columns():
                self._there[:count, begin:end] = rows[index]
            if self._stream is not None:
                self._host[:count].copy_(self._there[:count], non_blocking=True)

    def take(self) -> Bytes:
        """Return what was staged, uint8 [n, bytes of a block]; it is overwritten by any other call."""
        if self._stream is not None:
            self._stream.synchronize()
        blocks: Bytes = self._host[: self._staged].numpy()
        return blocks

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """Return blocks, uint8 [n, bytes of a block]."""
        blocks = np.empty((len(block_ids), self._host.shape[1]), np.uint8)
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for part in self._parts(len(block_ids)):
            self.stage(block_ids[part])
            blocks[part] = self.take()
        return blocks

    def write(self, block_ids: Sequence[int], blocks: Bytes) -> None:
        """Replace blocks by what ``read`` has returned, here or elsewhere, before what is computed next."""
        if self._stream is not None:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        for part in self._parts(len(block_ids)):
            index = torch.tensor(block_ids[part], device=self._device)
            count = len(index)
            self._host[:count] = torch.from_numpy(blocks[part])
            with self._apart():
                if self._stream is not None:
                    self._there[:count].copy_(self._host[:count], non_blocking=True)
                for rows, begin, end in self._columns():
                    rows[index] = self._there[:count, begin:end]
            if self._stream is not None:
                self._stream.synchronize()  # the pinned buffer is filled anew

    def _apart(self) -> AbstractContextManager[object]:
        """Return the context in which a GPU works beside its steps."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def _parts(self, count: int) -> Iterator[slice]:
        for begin in range(0, count, self.most_staged):
            yield slice(begin, begin + self.most_staged)

    def _columns(self) -> Iterator[tuple[torch.Tensor, int, int]]:
        """Yield each layer's rows, and from where to where they lie in a block."""
        begin = 0
        for rows in self._rows:
            end = begin + rows.shape[1]
            yield rows, begin, end
            begin = end


def _rows(name: str, layer: torch.Tensor, blocks: int) -> torch.Tensor:
    """Return a layer's KV as bytes, [blocks, bytes of a block]: a view."""
    dims = [(stride, size) for stride, size in zip(layer.stride(), layer.shape, strict=True) if size > 1]
    (stride, size), *inner = sorted(dims, reverse=True)
    dense = 1
    for inner_stride, inner_size in reversed(inner):
        dense = dense * inner_size if inner_stride == dense else 0
    parts = size // blocks  # a kernel may see one of vLLM's blocks as several
    if not dense or size % blocks or stride < dense or (parts > 1 and stride != dense):
        raise EngineError(
            f"the KV of {name} is laid out as {tuple(layer.shape)} with strides {layer.stride()}, not block"
            ' by block, and cannot be pooled; set [seer].kv_pool = "none"'
        )
    return torch.empty(0, dtype=torch.uint8, device=layer.device).set_(
        layer.untyped_storage(),
        layer.storage_offset() * layer.itemsize,
        (blocks, parts * dense * layer.itemsize),
        (parts * stride * layer.itemsize, 1),
    )
