"""The file of an optimizer's state in a checkpoint, with the state of torch's random numbers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from seer_core.error_origin import fact_of
from seer_core.errors import ConfigError

__all__ = ["load_optimizer", "save_optimizer"]


def save_optimizer(file: Path, optimizer: Any, updates: int) -> None:
    """Write the state of an optimizer that has made so many updates."""
    torch.save(
        {"optimizer": optimizer.state_dict(), "updates": updates, "random": torch.get_rng_state()}, file
    )


def load_optimizer(file: Path, optimizer: Any, device: torch.device | str) -> int:
    """Restore an optimizer and torch's random numbers; return how many updates have been made.

    Raises:
        ConfigError: the file is missing or damaged.
    """
    try:
        state = torch.load(file, weights_only=True, map_location=device)
        updates, noise = state["updates"], state["random"].cpu()
        if type(updates) is not int or updates < 0:
            raise ValueError(f"the number of updates is {updates!r}")
        optimizer.load_state_dict(state["optimizer"])
        _check_shapes(optimizer)
        torch.set_rng_state(noise)
    except Exception as error:  # torch has no class for damage, which may raise anything
        fact = fact_of(error)
        raise ConfigError(
            f"{file} is no state of an optimizer: {fact}; delete {file.parent} to use the one before"
        ) from error
    return updates


def _check_shapes(optimizer: Any) -> None:
    """Raise ValueError if a tensor of an optimizer is neither one number nor as large as its parameter."""
    for parameter, values in optimizer.state.items():
        for name, value in values.items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != parameter.shape:
                raise ValueError(f"{name} has the shape {tuple(value.shape)}, not {tuple(parameter.shape)}")
