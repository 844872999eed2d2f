"""Where the server is: ``engine_kwargs.seer`` of verl's config of rollouts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

__all__ = ["VerlSettings", "settings_of"]


@dataclass(frozen=True)
class VerlSettings:
    """``engine_kwargs.seer``: where ``seer serve`` listens, what it asks for, how long it waits."""

    url: str = "http://127.0.0.1:8000"
    """The address of ``seer serve``."""
    token_file: str | None = None
    """The file with the token that the server asks for; without it the client finds the one that a server of
    this machine has made.
    """
    patience_s: float = 60.0
    """For how long a server is tried that cannot be reached."""
    prompt_wait_s: float = 10.0
    """How long a batch waits for its last prompt, from its first on."""
    wait_s: float = 60.0
    """How long new weights and sleep wait for unfinished responses before they fail."""

    def __post_init__(self) -> None:
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"engine_kwargs.seer.url is {self.url!r}; write one like http://127.0.0.1:8000")
        for name in ("patience_s", "prompt_wait_s", "wait_s"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 86400:
                raise ValueError(f"engine_kwargs.seer.{name} is {value!r}; it must be seconds, 0 or more")

    @property
    def token(self) -> str | None:
        """The token that the server asks for, None if it asks for none."""
        if self.token_file is None:
            return None
        try:
            return Path(self.token_file).read_text("utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(
                f"cannot read {self.token_file}: {error}; name in engine_kwargs.seer.token_file the file that"
                " `seer serve` was given"
            ) from error

    @property
    def connection(self) -> dict[str, Any]:
        """The arguments of a client of the server."""
        return {"url": self.url, "token": self.token, "patience_s": self.patience_s}

    @property
    def is_local(self) -> bool:
        """Whether the server is on this machine."""
        host = urlsplit(self.url).hostname
        try:
            return host == "localhost" or ipaddress.ip_address(host or "").is_loopback
        except ValueError:
            return False


def settings_of(rollout: Any) -> VerlSettings:
    """Read ``engine_kwargs.seer`` of verl's ``RolloutConfig``, or of the config that it is made from.

    Raises:
        ValueError: a key is unknown, or a value is not valid.
    """
    given: Mapping[str, Any] = (rollout.engine_kwargs or {}).get("seer") or {}
    names = [field.name for field in fields(VerlSettings)]
    for name in given:
        if name not in names:
            raise ValueError(f"engine_kwargs.seer.{name} is unknown; there are {', '.join(names)}")
    return VerlSettings(**given)
