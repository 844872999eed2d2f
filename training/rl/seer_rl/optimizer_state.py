"""The file of an optimizer's state in a checkpoint, with the state of torch's random numbers."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import torch

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
    except (OSError, EOFError, RuntimeError, pickle.UnpicklingError) as error:
        fact = (str(error) or type(error).__name__).splitlines()[0]
        raise ConfigError(
            f"{file} is no state of an optimizer: {fact}; delete {file.parent} to use the one before"
        ) from error
    optimizer.load_state_dict(state["optimizer"])
    torch.set_rng_state(state["random"].cpu())
    updates: int = state["updates"]
    return updates
