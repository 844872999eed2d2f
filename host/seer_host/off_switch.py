"""The switch by which a user turns Seer off: the variable ``SEER``."""

from __future__ import annotations

import os

from seer_core.errors import ConfigError, quote

__all__ = ["is_off"]


def is_off() -> bool:
    """Return whether what Seer stands before is to work untouched: the variable ``SEER`` is ``off``.

    Raises:
        ConfigError: it is neither ``on`` nor ``off``.
    """
    switch = os.environ.get("SEER", "on")
    if switch not in ("on", "off"):
        raise ConfigError(f"the variable SEER is {quote(switch)}; set it to on or off, or unset it")
    return switch == "off"
