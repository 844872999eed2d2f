"""The imports of an instance, once, in a process that is forked into workers."""

from __future__ import annotations

from importlib import import_module

__all__ = ["preload"]

MODULES = (
    "seer_transformers.instance",
    "seer_worker.process.selftest",
    "transformers.models.qwen3.modeling_qwen3",
)
"""An engine's own, and those that it imports late: the family of a model, for one."""


def preload() -> None:
    """Import what an instance needs; start no thread, use no device."""
    for module in MODULES:
        import_module(module)
