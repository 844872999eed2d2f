"""The plug-in ``grouped_spec``: settings, the drafter, and what it needs of the machine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import msgspec
from seer_host.json_files import JsonFormat

from seer_core.errors import ConfigError
from seer_core.model.arrays import Tokens
from seer_core.plugins.hookspecs import Check, Startup, hookimpl
from seer_core.ports.drafting import SourceSpec, StepTimes
from seer_grouped_spec.doctor import compiled_index
from seer_grouped_spec.memory import EarlierResponses
from seer_grouped_spec.policy import MarginalBenefit
from seer_grouped_spec.settings import Settings, SourceSettings

__all__ = ["GroupedDrafter", "Settings", "seer_doctor", "seer_make_drafter"]

TIER = "supported"

SOURCE = "seer_grouped_spec.source:GroupedSource"

_PROFILE = JsonFormat[StepTimes](StepTimes, "no profile", "write one with `seer profile`", ConfigError)


class GroupedDrafter:
    """Says what the workers load, and keeps responses for later rollouts: a ``ResponseMemory``."""

    def __init__(
        self, settings: Settings, step_times: StepTimes | None, memory: EarlierResponses | None = None
    ) -> None:
        self._settings = settings
        self._step_times = step_times
        self._memory = memory

    def source(self) -> SourceSpec:
        """Return the engine half."""
        settings = msgspec.convert(self._settings, SourceSettings, from_attributes=True)
        return SourceSpec(
            SOURCE, msgspec.structs.asdict(settings), self._settings.draft_tokens, self._step_times
        )

    def shares(self) -> bool:
        """Return whether an instance receives the tokens that siblings write on other instances."""
        return self._settings.share

    def recall(self, prompt: Sequence[int]) -> Sequence[Tokens]:
        """Return the newest earlier responses to a prompt, the oldest of them first."""
        return () if self._memory is None else self._memory.recall(prompt)

    def remember(self, prompt: Sequence[int], response: Tokens) -> None:
        """Keep a response for later rollouts, if the settings ask for it."""
        if self._memory is not None:
            self._memory.remember(prompt, response)

    def clear(self) -> None:
        """Recall nothing of before."""
        if self._memory is not None:
            self._memory.clear()

    def policy(self, step_times: StepTimes) -> MarginalBenefit:
        """Return the pure half, for an engine that makes no tokens; a profile is of another engine."""
        return MarginalBenefit(step_times, self._settings.draft_tokens, self._settings.priority_factor)


@hookimpl
def seer_make_drafter(settings: Settings, startup: Startup) -> GroupedDrafter:
    """Read the profile."""
    if settings.lookup_min > settings.lookup_max:
        raise ConfigError(
            f"plugin.grouped_spec.lookup_min = {settings.lookup_min} exceeds"
            f" lookup_max = {settings.lookup_max}; lower it"
        )
    step_times = _read_profile(startup.path(settings.profile)) if settings.profile else None
    return GroupedDrafter(settings, step_times, _memory(settings, startup))


@hookimpl
def seer_doctor(settings: Settings | None, startup: Startup | None) -> list[Check]:
    """Look for the compiled index."""
    return [compiled_index()]


def _memory(settings: Settings, startup: Startup) -> EarlierResponses | None:
    """Open the memory of earlier responses.

    Raises:
        ConfigError: there is none to open, or nothing would be drafted from it.
    """
    file = startup.path(settings.earlier_file) if settings.earlier_file else None
    if not settings.earlier_responses:
        if file is not None:
            raise ConfigError(
                "plugin.grouped_spec.earlier_file is of no use while earlier_responses is 0; set that to the"
                " responses of a prompt to draft from, such as its group size"
            )
        return None
    if not settings.share:
        raise ConfigError(
            "plugin.grouped_spec.earlier_responses need share = true: they come to instances like siblings'"
            " text"
        )
    return EarlierResponses(settings.earlier_responses, settings.earlier_bytes, file)


def _read_profile(path: Path) -> StepTimes:
    try:
        return _PROFILE.read(path)
    except ConfigError as error:
        raise ConfigError(f"plugin.grouped_spec.profile: {error}") from error
