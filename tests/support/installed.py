"""Whether a library is there, without its import: that of an engine takes ten seconds and half a gigabyte."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

__all__ = ["skip_without"]


def skip_without(module: str, *, reason: str = "") -> None:
    """Skip a test, or a whole file at its import, where a top-level module is not installed."""
    if find_spec(module) is None:
        pytest.skip(reason or f"{module} is not installed", allow_module_level=True)
