"""Buffers in which blocks of KV lie between a device and main memory.

Those of a GPU are taken once: one on the device, in which the parts of all layers lie side by side, and a
pinned one, to and from which the GPU copies by itself.  They have a stream of their own, so that a step
computes meanwhile.  On a CPU both are one buffer of plain memory.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

__all__ = ["STAGED_BYTES", "CopyBuffers"]

STAGED_BYTES = 32 << 20
"""The size of each buffer, if a block is not larger: a millisecond's copy at 32 GB/s."""


class CopyBuffers:
    """Where blocks of one direction lie on their way: ``host`` in main memory, ``there`` on the device."""

    def __init__(self, device: torch.device, blocks: int, block_bytes: int) -> None:
        on_gpu = device.type == "cuda"
        shape = blocks, block_bytes
        self.host = torch.empty(shape, dtype=torch.uint8, pin_memory=on_gpu)
        self.there = torch.empty(shape, dtype=torch.uint8, device=device) if on_gpu else self.host
        self.stream = torch.cuda.Stream(device) if on_gpu else None  # type: ignore[no-untyped-call]

    def apart(self) -> AbstractContextManager[object]:
        """Return the context in which a GPU works beside its steps."""
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def wait(self) -> None:
        """Wait until everything has gone its way."""
        if self.stream is not None:
            self.stream.synchronize()
