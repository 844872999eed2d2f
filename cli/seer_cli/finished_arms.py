"""Finished arms of a comparison, kept in a directory so that the same command goes on behind them."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
from seer_host.json_files import UNREADABLE
from seer_host.line_files import claim
from seer_host.machine_probe import MachineProbe
from seer_session.results import Summary

from seer_cli.output import replacing, unwritable
from seer_core.errors import InputError, OutputError
from seer_core.model import PromptGroup

if TYPE_CHECKING:
    from seer_host.config_files import Config

__all__ = ["ArmOutcome", "FinishedArms", "fingerprint"]

SUFFIX = ".arm"


class ArmOutcome(msgspec.Struct, frozen=True):
    """One repeat of an arm that has finished."""

    arm: str
    """The arm's name."""
    number: int
    """The number of the repeat."""
    summary: Summary
    """The statistics of its rollout."""
    tokens: dict[str, list[int]]
    """The tokens of each response, by request."""
    cut: dict[str, bool]
    """Whether the limit on its tokens cut a response, by request."""
    probes: tuple[MachineProbe, MachineProbe] | None = None
    """How fast the machine was before and after it, if that was measured."""
    comparison: str = ""
    """The ``fingerprint`` of the comparison that it is of."""


def fingerprint(config: Config, groups: Sequence[PromptGroup], model_digest: str) -> str:
    """Return what stands for a comparison's settings, prompts and model."""
    # Without the launcher's table: tokens are the same wherever workers run.
    names = ("seer", "rollout", "tables", "engine", "kv_pool", "plugin")
    tables = [getattr(config, name) for name in names]
    encoded = msgspec.json.encode([msgspec.to_builtins(tables), list(groups), model_digest], order="sorted")
    return hashlib.sha256(encoded).hexdigest()[:32]


class FinishedArms:
    """A directory with a file for each finished repeat of an arm; without one nothing is kept."""

    def __init__(self, directory: Path | None = None, comparison: str = "") -> None:
        self._directory, self._comparison = directory, comparison
        self._found: dict[tuple[str, int], ArmOutcome] = {}

    @contextmanager
    def open(self, *, resume: bool) -> Iterator[FinishedArms]:
        """Read what is there, if the command goes on with it; keep other processes out meanwhile.

        Raises:
            OutputError: it cannot be written, or has arms, and the command does not go on with them.
            InputError: it has arms of another comparison, or something else.
        """
        if self._directory is None:
            yield self
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with claim(self._directory, f"another comparison writes into {self._directory}"):
                files = sorted(self._directory.glob(f"*{SUFFIX}"))
                if files and not resume:
                    raise OutputError(
                        f"{self._directory} holds a comparison; go on with it with --resume, or name another"
                        " directory"
                    )
                for path in files:
                    outcome = self._read(path)
                    self._found[outcome.arm, outcome.number] = outcome
                yield self
        except OSError as error:
            raise unwritable(self._directory, error) from error

    def get(self, arm: str, number: int) -> ArmOutcome | None:
        """Return what an earlier process has finished."""
        return self._found.get((arm, number))

    def keep(self, outcome: ArmOutcome) -> None:
        """Write a repeat down, whole or not at all."""
        if self._directory is not None:
            kept: Any = msgspec.structs.replace(outcome, comparison=self._comparison)
            name = f"{outcome.number}-{hashlib.sha256(outcome.arm.encode()).hexdigest()[:12]}{SUFFIX}"
            with replacing(self._directory / name) as new:
                new.write_bytes(msgspec.msgpack.encode(kept))

    def _read(self, path: Path) -> ArmOutcome:
        try:
            outcome = msgspec.msgpack.decode(path.read_bytes(), type=ArmOutcome)
        except UNREADABLE as error:
            raise InputError(f"{path} is no finished arm; delete it, and its arm is run again") from error
        if outcome.comparison != self._comparison:
            raise InputError(
                f"{path} is of a comparison with other settings, prompts or another model; restore them, or"
                " name another directory"
            )
        return outcome
