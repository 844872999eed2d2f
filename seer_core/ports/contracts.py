"""Contracts: the methods that a Protocol leaves open.

Methods marked ``optional`` do nothing by themselves.  A class that derives from the Protocol inherits them;
one that does not may lack them, as it may lack an attribute to which the Protocol gives a value.  The caller
asks once, with ``implemented``, and calls only what there is.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

__all__ = ["MARK", "implemented", "optional"]

F = TypeVar("F", bound=Callable[..., Any])

MARK = "__seer_optional__"
"""The attribute of methods that may be left out."""


def optional(method: F) -> F:
    """Mark a Protocol's method as one that may be left out."""
    setattr(method, MARK, True)
    return method


def implemented(thing: object, name: str) -> Callable[..., Any] | None:
    """Return the method that the author of ``thing`` wrote; None for none, and for the Protocol's own."""
    method = getattr(thing, name, None)
    return None if getattr(method, MARK, False) else method
