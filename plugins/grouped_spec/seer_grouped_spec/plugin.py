"""The plug-in ``grouped_spec``: settings, the drafter, and what it needs of the machine."""

from __future__ import annotations

from pathlib import Path

import msgspec

from seer_core.drafting import SourceSpec, StepTimes
from seer_core.errors import ConfigError, PluginError
from seer_core.hookspecs import Check, Startup, hookimpl
from seer_grouped_spec.doctor import compiled_index, zeromq
from seer_grouped_spec.policy import MarginalBenefit
from seer_grouped_spec.process import DraftServerError, DraftServerProcess
from seer_grouped_spec.settings import Settings, SourceSettings

__all__ = ["GroupedDrafter", "Settings", "seer_doctor", "seer_make_drafter"]

SOURCE = "seer_grouped_spec.source:GroupedSource"


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
    if settings.token_file and not settings.endpoints:
        raise ConfigError("plugin.grouped_spec.token_file is of no use without endpoints; name both")
    step_times = _read_profile(startup.path(settings.profile)) if settings.profile else None
    token = _read_token(startup.path(settings.token_file)) if settings.token_file else ""
    return GroupedDrafter(settings, step_times, token)


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for the compiled index, and for ZeroMQ where servers may be asked for."""
    shares = settings is None or settings.servers > 0 or bool(settings.endpoints)
    return [compiled_index(), zeromq()] if shares else [compiled_index()]


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
