"""The version of Seer that an interpreter has."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

__all__ = ["seer_version"]


def seer_version() -> str:
    """Return it; empty where Seer runs from its source without being installed."""
    try:
        return version("seer-worker")
    except PackageNotFoundError:
        return ""
