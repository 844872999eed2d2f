"""KV as blocks of bytes, for any order in which a kernel keeps the numbers within a block.

Between a GPU and main memory blocks go through buffers, on streams of their own, so that a step computes
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock

import numpy as np
import torch
from seer_worker.process.copy_buffers import STAGED_BYTES, CopyBuffers

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes

__all__ = ["VllmLayers"]


class VllmLayers:
    """The KV of all layers; a block of all of them is one row of bytes.

    One thread calls all but ``write``, which another may call meanwhile, for blocks that no step has.
    """

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        self._rows = [_rows(name, layer, blocks) for name, layer in kv_caches.items()]
        self._device = self._rows[0].device
        block_bytes = sum(rows.shape[1] for rows in self._rows)
        self.most_staged = max(1, STAGED_BYTES // block_bytes)
        """The blocks that ``stage`` takes at most."""
        self._out, self._put = (CopyBuffers(self._device, self.most_staged, block_bytes) for _ in range(2))
        self._into = CopyBuffers(self._device, self.most_staged, block_bytes)
        self._into_free = Lock()
        self._staged = 0

    def stage(self, block_ids: Sequence[int], after: torch.cuda.Event | None = None) -> None:
        """Begin to copy out blocks that no step writes any more, at most ``most_staged``; see ``take``.

        What the GPU computes for ``computed``, which returned ``after``, is done first.
        """
        self._staged = count = len(block_ids)
        if not count:
            return
        self._out, self._put = self._put, self._out
        out = self._out
        with out.apart():
            if out.stream is not None and after is not None:
                out.stream.wait_event(after)
            index = torch.tensor(block_ids, device=self._device)
            for rows, begin, end in self._columns():
                out.there[:count, begin:end] = rows[index]
            if out.stream is not None:
                out.host[:count].copy_(out.there[:count], non_blocking=True)

    def take(self) -> Bytes:
        """Return what was staged, uint8 [n, bytes of a block]; it stays until twice as much is staged."""
        self._out.wait()
        blocks: Bytes = self._out.host[: self._staged].numpy()
        return blocks

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """Return blocks, uint8 [n, bytes of a block]."""
        blocks = np.empty((len(block_ids), self._out.host.shape[1]), np.uint8)
        if self._out.stream is not None:
            self._out.stream.wait_stream(torch.cuda.current_stream(self._device))
        for part in self._parts(len(block_ids)):
            self.stage(block_ids[part])
            blocks[part] = self.take()
        return blocks

    def computed(self) -> torch.cuda.Event | None:
        """Return what ``stage`` and ``write`` wait for: all that this thread has let a GPU compute so far."""
        if self._device.type != "cuda":
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def write(self, block_ids: Sequence[int], blocks: Bytes, after: torch.cuda.Event | None = None) -> None:
        """Replace blocks by what ``read`` has returned, here or elsewhere; they are there when it returns.

        What the GPU computes for ``computed``, which returned ``after``, is done first.
        """
        into = self._into
        for part in self._parts(len(block_ids)):
            with self._into_free, into.apart():
                if into.stream is not None and after is not None:
                    into.stream.wait_event(after)
                index = torch.tensor(block_ids[part], device=self._device)
                count = len(index)
                into.host[:count] = torch.from_numpy(blocks[part])
                if into.stream is not None:
                    into.there[:count].copy_(into.host[:count], non_blocking=True)
                for rows, begin, end in self._columns():
                    rows[index] = into.there[:count, begin:end]
                into.wait()  # the pinned buffer is filled anew

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
