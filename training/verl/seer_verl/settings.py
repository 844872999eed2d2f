"""``engine_kwargs.seer`` of verl's config of rollouts."""

from __future__ import annotations

import ipaddress
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

__all__ = ["MODES", "KeptSettings", "VerlSettings", "kept_settings_of", "settings_of"]

MODES = ("on", "off", "shadow")


@dataclass(frozen=True)
class KeptSettings:
    """``engine_kwargs.seer`` where verl keeps its own engines: ``rollout.name`` is ``vllm`` or ``sglang``.

    Relative paths begin in the folder of the process of verl's trainer.
    """

    mode: str = "on"
    """``off`` is verl without Seer, untouched; ``shadow`` watches verl's own routing, and says what Seer
    would have taken. ``SEER=off`` in the trainer's environment is ``off`` too.
    """
    record: str = "seer-shadow"
    """The folder in which a shadow writes what it has watched, on each machine of verl's workers."""
    report: str | None = None
    """The folder in which a page of each step is written, on the machine of Seer's scheduler."""
    config: str | None = None
    """A file of Seer's configuration, without engines, on the machine of Seer's scheduler; without it the
    plug-ins are ``divided_rollout`` and ``length_posterior``.
    """
    most_fallbacks: int = 1024
    """Responses of a run that may be written without the scheduler, where that fails."""
    stall_s: float = 600.0
    """After so long without an answer of Seer's, or without a chunk while responses wait, it has failed."""
    canary: int = 0
    """Responses of each step that one server writes again whole, to compare."""
    canary_stop: int = 0
    """Do without the scheduler after so many that differ; 0 is never."""
    prompt_wait_s: float = 0.5
    """How long the groups of a batch wait for the last prompt, from the first on."""
    wait_s: float = 600.0
    """How long the end of a step waits for responses that are given up."""
    look_s: float = 5.0
    """How often a worker asks for the tokens so far, with which it would go on without Seer."""

    def __post_init__(self) -> None:
        _make_absolute(self, "record", "report", "config")
        if isinstance(self.mode, bool):  # YAML reads a bare on or off so
            object.__setattr__(self, "mode", "on" if self.mode else "off")
        if self.mode not in MODES:
            raise ValueError(f"engine_kwargs.seer.mode is {self.mode!r}; write one of {', '.join(MODES)}")
        for name in ("stall_s", "prompt_wait_s", "wait_s", "look_s"):
            _require_seconds(name, getattr(self, name))
        for name in ("most_fallbacks", "canary", "canary_stop"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 0:
                raise ValueError(f"engine_kwargs.seer.{name} is {value!r}; it must be a number, 0 or more")


def _make_absolute(settings: Any, *names: str) -> None:
    """Begin relative paths where they are read first: actors of Ray's have folders of their own."""
    for name in names:
        if path := getattr(settings, name):
            object.__setattr__(settings, name, str(Path(path).absolute()))


def _require_seconds(name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 86400:
        raise ValueError(f"engine_kwargs.seer.{name} is {value!r}; it must be seconds, 0 or more")


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
        _make_absolute(self, "token_file")
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"engine_kwargs.seer.url is {self.url!r}; write one like http://127.0.0.1:8000")
        for name in ("patience_s", "prompt_wait_s", "wait_s"):
            _require_seconds(name, getattr(self, name))

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


T = TypeVar("T")


def settings_of(rollout: Any) -> VerlSettings:
    """Read ``engine_kwargs.seer`` of verl's ``RolloutConfig``, or of the config that it is made from.

    Raises:
        ValueError: a key is unknown, or a value is not valid.
    """
    return _read(rollout, VerlSettings)


def kept_settings_of(rollout: Any) -> KeptSettings:
    """Read the same where verl keeps its engines; raises as ``settings_of``."""
    return _read(rollout, KeptSettings)


def _read(rollout: Any, kind: type[T]) -> T:
    given: Mapping[str, Any] = (rollout.engine_kwargs or {}).get("seer") or {}
    names = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    for name in given:
        if name not in names:
            raise ValueError(f"engine_kwargs.seer.{name} is unknown; there are {', '.join(names)}")
    return kind(**given)
