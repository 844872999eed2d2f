"""KV as blocks of bytes, for any order in which a kernel keeps the numbers within a block."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from seer_core.errors import EngineError
from seer_core.ports.kv import Bytes

__all__ = ["VllmLayers"]


class VllmLayers:
    """The KV of all layers; a block of all of them is one row of bytes."""

    def __init__(self, kv_caches: Mapping[str, torch.Tensor], blocks: int) -> None:
        self._rows = [_rows(name, layer, blocks) for name, layer in kv_caches.items()]
        self._device = self._rows[0].device

    def read(self, block_ids: Sequence[int]) -> Bytes:
        """Return blocks, uint8 [n, bytes of a block]."""
        index = torch.tensor(block_ids, device=self._device)
        blocks: Bytes = torch.cat([rows[index] for rows in self._rows], 1).cpu().numpy()
        return blocks

    def write(self, block_ids: Sequence[int], blocks: Bytes) -> None:
        """Replace blocks by what ``read`` has returned, here or elsewhere."""
        index = torch.tensor(block_ids, device=self._device)
        begin = 0
        for rows in self._rows:
            end = begin + rows.shape[1]
            rows[index] = torch.from_numpy(blocks[:, begin:end]).to(self._device)
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
