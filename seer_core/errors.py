"""Errors that name the culprit, the fact and the remedy; the CLI prints them without a traceback."""

from __future__ import annotations

__all__ = [
    "ConfigError",
    "EngineError",
    "OutputError",
    "PluginError",
    "PromptError",
    "SeerError",
    "StalledError",
    "TransitionError",
    "WeightVersionError",
]


class SeerError(Exception):
    """Something a user can mend; ``str(error)`` is one complete sentence or more."""


class ConfigError(SeerError):
    """The configuration cannot be used as written."""


class PluginError(SeerError):
    """A plug-in cannot be loaded, answers wrongly, or raised."""


class PromptError(SeerError):
    """A prompts file holds something that cannot be rolled out."""


class EngineError(SeerError):
    """An engine did not start, or none is left to go on with."""


class OutputError(SeerError):
    """Results cannot be written."""


class StalledError(SeerError):
    """Requests wait, nothing runs, and no instance is accepted for any of them."""


class TransitionError(SeerError):
    """A request was asked to do what its state does not allow."""


class WeightVersionError(SeerError):
    """A rollout would mix responses of two weight versions."""
