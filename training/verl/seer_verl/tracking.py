"""Seer's figures in verl's log: W&B, TensorBoard, the console, and all others of ``trainer.logger``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import wraps
from typing import Any

from verl.utils.tracking import Tracking

__all__ = ["log_with"]

STEP = "training/global_step"
"""The figure that a step's own log has, and validation's does not."""

_figures: list[Callable[[], Mapping[str, float]]] = []


def log_with(figures: Callable[[], Mapping[str, float]]) -> None:
    """Have verl log these figures with each step's; only those of the last call are."""
    if not _figures:
        _wrap()
    _figures[:] = [figures]


def _wrap() -> None:
    log = Tracking.log

    @wraps(log)
    def log_more(self: Any, data: Mapping[str, Any], *args: Any, **kwargs: Any) -> Any:
        if STEP in data:
            data = {**data, **_figures[0]()}
        return log(self, data, *args, **kwargs)

    Tracking.log = log_more
