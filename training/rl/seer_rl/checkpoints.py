"""Checkpoints: directories that are whole or absent, whenever the process is killed."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import structlog
from safetensors import SafetensorError

from seer_core import Config
from seer_core.errors import InputError, OutputError
from seer_core.json_files import UNREADABLE, describe_flaw
from seer_core.plugins.config import RolloutTable
from seer_rl.config import TrainTable, first_model
from seer_rl.journals import RolloutJournals
from seer_rl.trainer import Trainer

__all__ = ["WRITE_ERRORS", "Checkpoint", "CheckpointWriter", "Checkpoints", "TrainingState", "state_of"]

log = structlog.get_logger("seer")

STATE = "training.json"
UNFINISHED = ".unfinished-"

WRITE_ERRORS = (OSError, RuntimeError, SafetensorError)
"""Errors of writing to a full disk: torch and safetensors have errors of their own for it."""


class TrainingState(msgspec.Struct, frozen=True):
    """The state of a training run."""

    iterations: int
    """How many iterations are done."""
    seed: int
    """The run's seed."""
    train: TrainTable
    """The ``[train]`` table."""
    rollout: RolloutTable
    """The ``[rollout]`` table."""
    model: str
    """The directory of the first weights."""
    environment: dict[str, Any] = {}
    """The settings of the plug-in that answers turns, by its name; empty without one."""


def state_of(
    iterations: int, table: TrainTable, config: Config, environment: dict[str, Any]
) -> TrainingState:
    """Return the state of a run when so many iterations are done."""
    model = str(first_model(table, config))
    return TrainingState(iterations, config.seer.seed, table, config.rollout, model, environment)


class Checkpoint(msgspec.Struct, frozen=True):
    """A whole checkpoint, from which a run can be resumed."""

    path: Path
    state: TrainingState


class Checkpoints:
    """The last ``keep`` checkpoints in a directory, named by the number of iterations done."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep

    def latest(self) -> Checkpoint | None:
        """Return the last checkpoint that was finished, None if there is none.

        Raises:
            InputError: it cannot be read.
        """
        paths = self._finished()
        if not paths:
            return None
        file = paths[-1] / STATE
        try:
            return Checkpoint(paths[-1], msgspec.json.decode(file.read_bytes(), type=TrainingState))
        except (OSError, *UNREADABLE) as error:
            raise InputError(
                f"{file} is no state of training: {describe_flaw(error)};"
                f" delete {paths[-1]} to use the one before"
            ) from error

    def save(self, state: TrainingState, write: Callable[[Path], Any]) -> Path:
        """Let ``write`` fill a new directory, make it the latest checkpoint, and delete the oldest.

        Raises:
            OutputError: there is no room, for example; earlier checkpoints are as they were.
        """
        target = self._root / f"{state.iterations:06d}"
        new: Path | None = None
        try:
            self._root.mkdir(parents=True, exist_ok=True)
            for unfinished in self._root.glob(f"{UNFINISHED}*"):  # of a process that was killed
                shutil.rmtree(unfinished)
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
        except WRITE_ERRORS as error:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)
            raise OutputError(
                f"cannot write the checkpoint {target}: {error}; make room, then go on with --resume"
            ) from error
        return target

    def _finished(self) -> list[Path]:
        if not self._root.is_dir():
            return []
        return sorted(
            (path for path in self._root.iterdir() if path.name.isdecimal()), key=lambda each: int(each.name)
        )


class CheckpointWriter:
    """Saves a trainer in a thread of its own, one checkpoint at a time; a context manager.

    Where the ``with`` block ends by an error, the failure of the last checkpoint is logged beside it.
    """

    def __init__(
        self,
        checkpoints: Checkpoints,
        trainer: Trainer,
        table: TrainTable,
        config: Config,
        journals: RolloutJournals,
        environment: dict[str, Any],
    ) -> None:
        self._checkpoints, self._trainer = checkpoints, trainer
        self._table, self._config, self._journals = table, config, journals
        self._environment = environment
        self._thread = ThreadPoolExecutor(1, "seer-checkpoint")
        self._saving: Future[None] | None = None

    def __enter__(self) -> CheckpointWriter:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and self._saving is not None:
            failure = self._saving.exception()
            if failure is not None:
                log.error("checkpoint_failed", reason=str(failure))
        self._thread.shutdown()

    @property
    def busy(self) -> bool:
        """Whether a checkpoint has been begun and not been waited for."""
        return self._saving is not None

    def begin(self, iterations: int) -> None:
        """Begin to save the trainer's state after so many iterations; nothing may change until ``wait``."""
        self._saving = self._thread.submit(self._save, iterations)

    def wait(self) -> None:
        """Wait for the checkpoint that has been begun, if there is one.

        Raises:
            OutputError: it could not be written.
        """
        saving, self._saving = self._saving, None
        if saving is not None:
            saving.result()

    def _save(self, iterations: int) -> None:
        def write(directory: Path) -> None:
            self._trainer.export(directory)
            self._trainer.save(directory)

        state = state_of(iterations, self._table, self._config, self._environment)
        self._checkpoints.save(state, write)
        self._journals.drop(iterations)


def _flush(path: Path) -> None:
    """Wait until the disk holds a file, so that a rename never comes before it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
