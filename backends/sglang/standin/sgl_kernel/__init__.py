"""The part of ``sgl_kernel`` that SGLang 0.5.23 calls without a GPU; anything else raises when it is called.

Indices of the KV cache are called slots here: ``req_to_token`` says, row by row, in which slot a request's KV
lies.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor

__all__ = [
    "STAND_IN",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "copy_all_layer_kv_cache_cpu",
    "fill_accept_out_cache_loc_cpu",
]

__version__ = "0.4.10"
"""That of the kernels SGLang 0.5.23 asks for."""

STAND_IN = True
"""Marks the stand-in; the kernels lack it."""

_library: Any = torch.library.Library  # untyped
_torchvision = _library("torchvision", "FRAGMENT")
if not hasattr(torch.ops.torchvision, "nms"):
    # torchvision describes them to torch as soon as it is imported, but brings them for GPUs alone.
    _torchvision.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _torchvision.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")


def assign_req_to_token_pool_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Write slots, which come one after the other, into requests' rows, from start to end."""
    places = _places(req_to_token, req_pool_indices, start_offset, end_offset)
    req_to_token.view(-1)[places] = out_cache_loc[: len(places)].to(req_to_token.dtype)


def assign_extend_cache_locs_cpu(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
    pool_len: int,
) -> None:
    """Read slots out of requests' rows, the other way round."""
    places = _places(req_to_token, req_pool_indices, start_offset, end_offset)
    out_cache_loc[: len(places)] = req_to_token.view(-1)[places].to(out_cache_loc.dtype)


def _places(table: Tensor, rows: Tensor, starts: Tensor, ends: Tensor) -> Tensor:
    """Return where each row's columns from start to end are in the flattened table, row after row."""
    width = table.shape[1]
    if len(ends) and int(ends.max()) > width:  # a kernel would go on in the next row
        raise IndexError(f"a request's row has {width} columns, and {int(ends.max())} are asked for")
    sizes = (ends - starts).long()
    before = rows.long() * width + starts - (sizes.cumsum(0) - sizes)
    return torch.repeat_interleave(before, sizes) + torch.arange(int(sizes.sum()))


def copy_all_layer_kv_cache_cpu(data_ptrs: Tensor, strides: Tensor, tgt_loc: Tensor, src_loc: Tensor) -> None:
    """Copy slots to other slots in every buffer, all read before any is written.

    Args:
        data_ptrs: the buffers' addresses.
        strides: bytes of a slot in each.
        tgt_loc: slots to write.
        src_loc: slots to read, as many.
    """
    moves = [move for move in zip(src_loc.tolist(), tgt_loc.tolist(), strict=True) if move[0] != move[1]]
    for address, size in zip(data_ptrs.tolist(), strides.tolist(), strict=True):
        read = [ctypes.string_at(address + source * size, size) for source, _ in moves]
        for content, (_, target) in zip(read, moves, strict=True):
            ctypes.memmove(address + target * size, content, size)


def fill_accept_out_cache_loc_cpu(
    accept_index: Tensor, out_cache_loc: Tensor, accept_out_cache_loc: Tensor
) -> None:
    """Write the slots of accepted drafts one after the other; -1 in ``accept_index`` is none."""
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].long()
    accept_out_cache_loc[: len(accepted)] = out_cache_loc[accepted]


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function for any other name; SGLang imports many that it does not call."""
    if name.startswith("_"):
        raise AttributeError(name)

    def unavailable(*arguments: Any, **named: Any) -> NoReturn:
        raise NotImplementedError(
            f"sgl_kernel.{name} is not in the stand-in for machines without a GPU; SGLang calls it here, so"
            " either leave out the setting that brought it there, or write it in backends/sglang/standin"
        )

    unavailable.__name__ = name
    return unavailable
