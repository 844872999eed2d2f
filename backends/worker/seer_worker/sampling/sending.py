"""Numbers on their way to a device, for which the host does not wait, and back, for which it waits once."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

__all__ = ["read", "sent"]


def sent(values: NDArray[Any], device: torch.device | str) -> Tensor:
    """Return an array as a tensor on a device, where later work finds it; the array may be changed at once.

    A copy from memory that is not pinned makes the host wait until the device has done all before it.  On a
    CPU there is no copy, and the array must stay as it is.
    """
    tensor = torch.from_numpy(values)
    if torch.device(device).type == "cpu":
        return tensor
    return tensor.pin_memory().to(device, non_blocking=True)


def read(*columns: Tensor) -> list[NDArray[Any]]:
    """Return columns of numbers, each [rows], from a device in one copy; of integers below 2**53.

    On a CPU they share the tensors' memory.
    """
    if columns[0].device.type == "cpu":
        return [each.numpy() for each in columns]
    rows = torch.stack([each.to(torch.float64) for each in columns]).cpu().numpy()
    whole = [not each.is_floating_point() for each in columns]
    return [row.astype(np.int64) if exact else row for row, exact in zip(rows, whole, strict=True)]
