"""The weights that a trainer has put into shared memory, by ``SharedWeights``, read by an engine."""

from __future__ import annotations

import fcntl
import math
import os
from collections.abc import Iterator, Mapping
from mmap import ACCESS_COPY, mmap
from typing import Any

import torch

from seer_core.errors import EngineError

__all__ = ["SharedMemory"]

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


class SharedMemory:
    """Tensors in sealed memory, which are mapped and not copied."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Map the memory.

        Raises:
            EngineError: it is gone, holds other weights, or could still change.
        """
        self._table = settings["table"]
        try:
            # Where it is another process's file, that may be a pipe, for whose writer an open would wait.
            descriptor = os.open(settings["area"], os.O_RDONLY | os.O_NONBLOCK)
            try:
                sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
                self._memory = mmap(descriptor, 0, access=ACCESS_COPY)
            finally:
                os.close(descriptor)
        except (OSError, ValueError) as error:
            raise EngineError(
                f"the weights in shared memory cannot be read: {error}; the trainer must be alive, on the"
                " engine's machine and of the engine's user"
            ) from error
        digest = settings["digest"].encode()
        if not sealed or self._memory[-len(digest) :] != digest:
            raise EngineError(
                f"{settings['area']} does not hold the weights whose digest is {settings['digest']}: its"
                " process is another one by now; update the weights again"
            )

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensor after tensor, as they lie in memory."""
        for name, dtype, shape, begin, _ in self._table:
            kind, count = getattr(torch, dtype), math.prod(shape)
            if not count:
                yield name, torch.empty(shape, dtype=kind)
                continue
            yield name, torch.frombuffer(self._memory, dtype=kind, count=count, offset=begin).view(shape)

    def bytes_between(self, begin: int, end: int) -> torch.Tensor:
        """Return bytes of the memory, uint8 [end - begin], as they lie there."""
        if begin == end:
            return torch.empty(0, dtype=torch.uint8)
        return torch.frombuffer(self._memory, dtype=torch.uint8, count=end - begin, offset=begin)
