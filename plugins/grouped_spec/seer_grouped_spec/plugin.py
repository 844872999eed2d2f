"""The plug-in ``grouped_spec``: settings, the drafter, and what it needs of the machine."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Sequence
from pathlib import Path

import msgspec

from seer_core.drafting import SourceSpec, StepTimes
from seer_core.errors import ConfigError, PluginError
from seer_core.hookspecs import Check, Startup, hookimpl
from seer_core.reading import Form, flaw
from seer_grouped_spec.connection import Lost, address_of, try_server
from seer_grouped_spec.doctor import compiled_index
from seer_grouped_spec.handshake import WRONG_TOKEN
from seer_grouped_spec.policy import MarginalBenefit
from seer_grouped_spec.process import DraftServerError, DraftServerProcess
from seer_grouped_spec.settings import Settings, SourceSettings

__all__ = ["GroupedDrafter", "Settings", "seer_doctor", "seer_make_drafter"]

SOURCE = "seer_grouped_spec.source:GroupedSource"
FIND_S = 5.0

_PROFILE = Form[StepTimes](StepTimes, "no profile", "write one with `seer profile`", ConfigError)


class GroupedDrafter:
    """Starts the draft servers a run needs, and says what its workers load."""

    def __init__(self, settings: Settings, step_times: StepTimes | None, token: str) -> None:
        self._settings = settings
        self._step_times = step_times
        self._token = token
        self._servers: list[DraftServerProcess] = []
        self._endpoints: tuple[str, ...] = ()

    async def start(self, instances: int) -> None:
        """Start the servers, unless there is one instance only, or find those that run already.

        Raises:
            PluginError: a server did not start, or is not where it should be, or has another token.
        """
        await self.stop()
        if self._settings.endpoints:
            await self._find(self._settings.endpoints)
            return
        if instances == 1:
            return
        self._token = secrets.token_hex(32)
        self._servers = [
            DraftServerProcess(memory_bytes=self._settings.memory_bytes, token=self._token)
            for _ in range(self._settings.servers)
        ]
        try:
            self._endpoints = tuple([await server.start() for server in self._servers])
        except DraftServerError as error:
            raise PluginError(
                f"plug-in 'grouped_spec': {error}; run without sharing: plugin.grouped_spec.servers = 0"
            ) from error

    async def _find(self, endpoints: Sequence[str]) -> None:
        for endpoint in endpoints:
            try:
                await asyncio.to_thread(try_server, endpoint, self._token, FIND_S)
            except Lost as error:
                remedy = (
                    "name the file with its token as token_file"
                    if str(error) == WRONG_TOKEN
                    else "start it, or correct endpoints"
                )
                raise PluginError(
                    f"plug-in 'grouped_spec': the draft server {endpoint}: {error}; {remedy}"
                ) from error
        self._endpoints = tuple(endpoints)

    async def stop(self) -> None:
        """End the servers that were started."""
        servers, self._servers, self._endpoints = self._servers, [], ()
        for server in servers:
            await server.stop()

    def source(self) -> SourceSpec:
        """Return the engine half, with the servers' addresses."""
        shared = msgspec.convert(self._settings, SourceSettings, from_attributes=True)
        source = msgspec.structs.replace(shared, endpoints=self._endpoints, token=self._token)
        return SourceSpec(
            SOURCE, msgspec.structs.asdict(source), self._settings.draft_tokens, self._step_times
        )

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
    for endpoint in settings.endpoints:
        try:
            address_of(endpoint)
        except ValueError as error:
            raise ConfigError(
                f"plugin.grouped_spec.endpoints: {error}; write it as the server prints it"
            ) from error
    if settings.token_file and not settings.endpoints:
        raise ConfigError("plugin.grouped_spec.token_file is of no use without endpoints; name both")
    step_times = _read_profile(startup.path(settings.profile)) if settings.profile else None
    token = _read_token(startup.path(settings.token_file)) if settings.token_file else ""
    return GroupedDrafter(settings, step_times, token)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for the compiled index."""
    return [compiled_index()]


def _read_profile(path: Path) -> StepTimes:
    try:
        return _PROFILE.read(path)
    except ConfigError as error:
        raise ConfigError(f"plugin.grouped_spec.profile: {error}") from error


def _read_token(path: Path) -> str:
    try:
        token = path.read_text("utf-8").strip()
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"plugin.grouped_spec.token_file: {path} cannot be read: {flaw(error)}; name the file with the"
            " server's token"
        ) from error
    if not token:
        raise ConfigError(f"plugin.grouped_spec.token_file: {path} is empty; write the token into it")
    return token
