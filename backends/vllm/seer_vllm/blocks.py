"""KV as blocks of bytes, for any order in which a kernel keeps the numbers within a block.

Between a GPU and main memory blocks go through buffers, on streams of their own, so that a step computes
meanwhile.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from threading import Lock
from typing import Any

import attrs
import numpy as np
import torch
from seer_worker.process.copy_buffers import STAGED_BYTES, CopyBuffers

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes

__all__ = ["KvPage", "VllmLayers"]


@attrs.frozen
class KvPage:
    """Where a layer keeps a block: ``size`` bytes of the memory that layers share.

    Block number b begins at byte ``offset + b * stride``.
    """

    layer: str
    offset: int
    stride: int
    size: int


class VllmLayers:
    """The KV of all layers; a block of all of them is one row of bytes.

    Where layers are in groups, with blocks of their own, block b of group number g is row g * blocks + b.
    Their layers are given as ``pages``.  A group with less to keep leaves the end of its rows as it is.  What
    is ``beside`` the layers moves with the first group's.

    One thread calls all but ``write``, which another may call meanwhile, for blocks that no step has.
    """

    def __init__(
        self,
        kv_caches: Mapping[str, Any],
        blocks: int,
        pages: Sequence[Sequence[KvPage]] | None = None,
        beside: Mapping[str, torch.Tensor] = {},
    ) -> None:
        self._blocks = blocks
        if pages is None:
            self._groups = [[_rows(name, layer, blocks) for name, layer in kv_caches.items()]]
        else:
            self._groups = [[_page_rows(kv_caches, page, blocks) for page in group] for group in pages]
        self._groups[0] += [_rows(name, layer, blocks) for name, layer in beside.items()]
        self._device = self._groups[0][0].device
        block_bytes = max(sum(rows.shape[1] for rows in group) for group in self._groups)
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
            for places, index, rows, begin, end in self._columns(block_ids):
                out.there[places, begin:end] = rows[index]
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
                count = len(block_ids[part])
                into.host[:count] = torch.from_numpy(blocks[part])
                if into.stream is not None:
                    into.there[:count].copy_(into.host[:count], non_blocking=True)
                for places, index, rows, begin, end in self._columns(block_ids[part]):
                    rows[index] = into.there[places, begin:end]
                into.wait()  # the pinned buffer is filled anew

    def _parts(self, count: int) -> Iterator[slice]:
        for begin in range(0, count, self.most_staged):
            yield slice(begin, begin + self.most_staged)

    def _columns(
        self, row_numbers: Sequence[int]
    ) -> Iterator[tuple[slice | torch.Tensor, torch.Tensor, torch.Tensor, int, int]]:
        """Yield which rows have a layer's blocks, these, all of the layer, and where they lie in a row."""
        wanted = torch.tensor(row_numbers)
        for number, layers in enumerate(self._groups):
            places: slice | torch.Tensor = slice(len(row_numbers))
            index = wanted
            if len(self._groups) > 1:
                places = (wanted // self._blocks == number).nonzero()[:, 0]
                index = wanted[places] % self._blocks
                places = places.to(self._device)
                if not len(index):
                    continue
            index = index.to(self._device)
            begin = 0
            for rows in layers:
                end = begin + rows.shape[1]
                yield places, index, rows, begin, end
                begin = end


def _page_rows(kv_caches: Mapping[str, Any], page: KvPage, blocks: int) -> torch.Tensor:
    """Return a layer's pages as bytes, [blocks, bytes of a page]: a view."""
    layer = kv_caches[page.layer]
    parts = layer if isinstance(layer, list | tuple) else [layer]
    memory = parts[0].untyped_storage()
    last = page.offset + (blocks - 1) * page.stride + page.size
    begins = [part.storage_offset() * part.itemsize for part in parts]
    here = {part.untyped_storage().data_ptr() for part in parts} == {memory.data_ptr()}
    if not here or memory.nbytes() < last or min(begins) != page.offset:
        raise EngineError(
            f"the KV of {page.layer} is not where vLLM's plan has it, and cannot be pooled; set"
            ' [seer].kv_pool = "none"'
        )
    return torch.empty(0, dtype=torch.uint8, device=parts[0].device).set_(
        memory, page.offset, (blocks, page.size), (page.stride, 1)
    )


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
