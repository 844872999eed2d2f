"""Checkpoints of training: directories that are whole or not there, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
from safetensors import SafetensorError

from seer_core import Config
from seer_core.config import RolloutTable
from seer_core.errors import InputError, OutputError
from seer_core.reading import UNREADABLE, flaw
from seer_rl.config import TrainTable, first_model

__all__ = ["WRITING", "Checkpoint", "Checkpoints", "State", "state_of"]

STATE = "training.json"
UNFINISHED = ".unfinished-"

WRITING = (OSError, RuntimeError, SafetensorError)
"""What writing raises on a full disk: torch and safetensors have errors of their own for it."""


class State(msgspec.Struct, frozen=True):
    """What a checkpoint says of itself: ``iterations`` are done, under this seed and these settings.

    ``model`` is the directory of the first weights.
    """

    iterations: int
    seed: int
    train: TrainTable
    rollout: RolloutTable
    model: str


def state_of(iterations: int, table: TrainTable, config: Config) -> State:
    """Return the state of a run when so many iterations are done."""
    return State(iterations, config.seer.seed, table, config.rollout, str(first_model(table, config)))


class Checkpoint(msgspec.Struct, frozen=True):
    """A checkpoint that can be gone on from."""

    path: Path
    state: State


class Checkpoints:
    """The last ``keep`` checkpoints in a directory, named by the number of iterations done."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep

    def latest(self) -> Checkpoint | None:
        """Return the last one that was finished.

        Raises:
            InputError: it cannot be read.
        """
        paths = self._finished()
        if not paths:
            return None
        file = paths[-1] / STATE
        try:
            return Checkpoint(paths[-1], msgspec.json.decode(file.read_bytes(), type=State))
        except (OSError, *UNREADABLE) as error:
            raise InputError(
                f"{file} is no state of training: {flaw(error)}; delete {paths[-1]} to use the one before"
            ) from error

    def save(self, state: State, write: Callable[[Path], Any]) -> Path:
        """Let ``write`` fill a new directory, make it the latest checkpoint, and delete those too old.

        Raises:
            OutputError: there is no room, say; earlier checkpoints are as they were.
        """
        target = self._root / f"{state.iterations:06d}"
        new: Path | None = None
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for left in self._root.glob(f"{UNFINISHED}*"):  # by a process that was killed
                shutil.rmtree(left)
            new = Path(tempfile.mkdtemp(prefix=UNFINISHED, dir=self._root))
            new.chmod(0o755)
            write(new)
            (new / STATE).write_bytes(msgspec.json.encode(state))
            for path in (*new.iterdir(), new):
                _flush(path)
            new.rename(target)
            _flush(self._root)
            for old in self._finished()[: -self._keep]:
                shutil.rmtree(old)
        except WRITING as error:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)
            raise OutputError(
                f"cannot write the checkpoint {target}: {error}; make room, then go on with --resume"
            ) from error
        return target

    def _finished(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted((path for path in self._root.iterdir() if path.name.isdecimal()), key=_number)


def _number(path: Path) -> int:
    return int(path.name)


def _flush(path: Path) -> None:
    """Have the disk hold what was written, so that a rename never comes before it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
