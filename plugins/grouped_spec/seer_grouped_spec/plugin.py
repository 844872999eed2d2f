"""The plug-in ``grouped_spec``: settings, the drafter, and what it needs of the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta, Struct

from seer_core.drafting import SourceSpec, StepTimes
from seer_core.errors import ConfigError, PluginError
from seer_core.hookspecs import Startup, hookimpl
from seer_grouped_spec.policy import MarginalBenefit
from seer_grouped_spec.process import DraftServerError, DraftServerProcess

__all__ = ["GroupedDrafter", "Settings", "seer_make_drafter"]

SOURCE = "seer_grouped_spec.source:GroupedSource"
SHARED_SETTINGS = (
    "policy",
    "priority_factor",
    "lookup_min",
    "lookup_max",
    "min_probability",
    "memory_bytes",
    "group_ttl_s",
    "flush_s",
    "fetch_s",
)
"""Settings that a worker's source has too, under the same names."""

Positive = Annotated[int, Meta(ge=1)]
Seconds = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]


class Settings(Struct, frozen=True, forbid_unknown_fields=True):
    """``[plugin.grouped_spec]``.

    ``policy`` says what is drafted: "token" verifies the most probable draft tokens of the whole batch, as
    many as pay; "class" gives probes and others a length each, as the paper does.
    ``draft_tokens`` is the paper's gamma_max, ``priority_factor`` its lambda: what a probe's token is
    worth in tokens of others.  A draft begins after a match of at least ``lookup_min`` tokens and looks at
    ``lookup_max`` at most; one whose chance falls below ``min_probability`` is cut there.  ``memory_bytes``
    bounds the index of one instance and the log of one server; a group unused for ``group_ttl_s`` is
    dropped.  ``profile`` is a file of ``seer profile``, relative to the config; without one each instance
    measures its own step times when it starts.

    ``servers`` draft servers are started when there is more than one instance; 0 keeps every index to
    itself.  ``endpoints`` joins servers that run already instead, with the token in ``token_file`` if they
    ask for one.  Appends leave every ``flush_s`` seconds, siblings' text is fetched every ``fetch_s``.
    """

    policy: Literal["token", "class"] = "token"
    draft_tokens: Annotated[int, Meta(ge=1, le=64)] = 8
    priority_factor: Annotated[float, Meta(ge=1)] = 2.0
    lookup_min: Positive = 1
    lookup_max: Annotated[int, Meta(ge=1, le=64)] = 64
    min_probability: Share = 0.0
    memory_bytes: Annotated[int, Meta(ge=1 << 20)] = 1 << 30
    group_ttl_s: Seconds = 3600.0
    profile: str = ""
    servers: Annotated[int, Meta(ge=0, le=64)] = 1
    endpoints: tuple[str, ...] = ()
    token_file: str = ""
    flush_s: Seconds = 0.05
    fetch_s: Seconds = 0.1


class GroupedDrafter:
    """Starts the draft servers a run needs, and says what its workers load."""

    def __init__(self, settings: Settings, step_times: StepTimes | None, token: str) -> None:
        self._settings = settings
        self._step_times = step_times
        self._token = token
        self._servers: list[DraftServerProcess] = []
        self._endpoints: tuple[str, ...] = ()

    async def start(self, instances: int) -> None:
        """Start the servers, unless there is one instance only or they run already.

        Raises:
            PluginError: a server did not start.
        """
        await self.stop()
        self._endpoints = self._settings.endpoints
        if self._endpoints or instances == 1:
            return
        self._servers = [
            DraftServerProcess(memory_bytes=self._settings.memory_bytes)
            for _ in range(self._settings.servers)
        ]
        try:
            self._endpoints = tuple([await server.start() for server in self._servers])
        except DraftServerError as error:
            raise PluginError(
                f"plug-in 'grouped_spec': {error}; run without sharing: plugin.grouped_spec.servers = 0"
            ) from error

    async def stop(self) -> None:
        """End the servers that were started."""
        servers, self._servers, self._endpoints = self._servers, [], ()
        for server in servers:
            await server.stop()

    def source(self) -> SourceSpec:
        """Return the engine half, with the servers' addresses."""
        chosen = self._settings
        settings = {
            "endpoints": self._endpoints,
            "token": self._token,
            **{name: getattr(chosen, name) for name in SHARED_SETTINGS},
        }
        return SourceSpec(SOURCE, settings, chosen.draft_tokens, self._step_times)

    def policy(self, step_times: StepTimes) -> MarginalBenefit:
        """Return the pure half, for an engine that makes no tokens; a profile is of another engine."""
        return MarginalBenefit(step_times, self._settings.draft_tokens, self._settings.priority_factor)


@hookimpl
def seer_make_drafter(settings: Settings, startup: Startup) -> GroupedDrafter:
    """Read the profile and the token; start nothing."""
    if settings.lookup_min > settings.lookup_max:
        raise ConfigError(
            f"plugin.grouped_spec.lookup_min = {settings.lookup_min} exceeds"
            f" lookup_max = {settings.lookup_max}; lower it"
        )
    if settings.token_file and not settings.endpoints:
        raise ConfigError("plugin.grouped_spec.token_file is of no use without endpoints; name both")
    step_times = _read_profile(startup.path(settings.profile)) if settings.profile else None
    token = _read_token(startup.path(settings.token_file)) if settings.token_file else ""
    return GroupedDrafter(settings, step_times, token)


def _read_profile(path: Path) -> StepTimes:
    try:
        return msgspec.json.decode(path.read_bytes(), type=StepTimes)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"plugin.grouped_spec.profile: {path} is no profile: {error}; write one with `seer profile`"
        ) from error


def _read_token(path: Path) -> str:
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"plugin.grouped_spec.token_file: {path} cannot be read: {error}") from error
    if not token:
        raise ConfigError(f"plugin.grouped_spec.token_file: {path} is empty; write the token into it")
    return token
