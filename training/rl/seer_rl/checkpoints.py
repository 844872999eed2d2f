"""Checkpoints: directories that are whole or absent, whenever the process is killed."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import structlog
from safetensors import SafetensorError
from seer_host.config_files import RolloutTable
from seer_host.json_files import UNREADABLE, describe_flaw
from seer_session import Config

from seer_core.error_origin import fact_of, is_ctrl_c
from seer_core.errors import SHOWN, ConfigError, InputError, OutputError, SeerError, printable
from seer_rl.checkpoint_digests import DIGESTS, bytes_of_file, check_digests, write_digests
from seer_rl.config import TrainTable, first_model
from seer_rl.journals import RolloutJournals
from seer_rl.trainer import Trainer

__all__ = ["WRITE_ERRORS", "Checkpoint", "CheckpointWriter", "Checkpoints", "TrainingState", "state_of"]

log = structlog.get_logger("seer")

STATE = "training.json"
UNFINISHED = ".unfinished-"

MOST_NAMED = 10
"""Unknown settings of a checkpoint that an error names."""

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
    digests: bool = False
    """Whether the checkpoint has ``digests.json``, a digest of each of its files."""


def state_of(
    iterations: int, table: TrainTable, config: Config, environment: dict[str, Any]
) -> TrainingState:
    """Return the state of a run when so many iterations are done."""
    model = str(first_model(table, config))
    return TrainingState(iterations, config.seer.seed, table, config.rollout, model, environment, True)


class Checkpoint(msgspec.Struct, frozen=True):
    """A whole checkpoint, from which a run can be resumed; one of an old version has no digests."""

    path: Path
    state: TrainingState


class Checkpoints:
    """The last ``keep`` checkpoints in a directory, named by the number of iterations done."""

    def __init__(self, root: Path, keep: int) -> None:
        self._root = root
        self._keep = keep

    @property
    def latest_path(self) -> Path | None:
        """The directory of the last checkpoint that was finished, None if there is none.

        Raises:
            InputError: the directory of all checkpoints cannot be read.
        """
        paths = self._finished()
        return paths[-1] if paths else None

    def latest(self) -> Checkpoint | None:
        """Return the last checkpoint that was finished, None if there is none; its files are checked.

        Raises:
            InputError: it cannot be read, or a file of it is not as it was written.
            ConfigError: it has settings that this version has not.
        """
        path = self.latest_path
        if path is None:
            return None
        try:
            state, written = _read_state(path)
            if state.digests or (path / DIGESTS).exists():
                check_digests(path)
            else:
                log.warning(
                    "checkpoint_unchecked",
                    reason=f"{path} has no digests, so damage to it would not be found",
                )
        except InputError as error:
            raise InputError(f"{error}; {self._remedy(path)}") from error
        if unknown := _unknown_keys(written, msgspec.json.decode(msgspec.json.encode(state))):
            raise ConfigError(
                f"{path / STATE} has {', '.join(unknown[:MOST_NAMED])}, which this version of Seer lacks; go"
                f" on with the version that wrote it, or {self._remedy(path)}"
            )
        return Checkpoint(path, state)

    @contextmanager
    def loading(self, checkpoint: Checkpoint) -> Iterator[None]:
        """Explain errors of the ``with`` block, in which a trainer loads a checkpoint.

        Raises:
            ConfigError: the trainer refuses it; the message names the checkpoint before.
            InputError: the trainer raised something else.
            SeerError: any other error of Seer's, unchanged.
        """
        path = checkpoint.path
        try:
            yield
        except ConfigError as error:
            before = self._before(path) or "none"
            raise ConfigError(f"{error} (the checkpoint before it: {before})") from error
        except SeerError:
            raise
        except BaseException as error:
            if is_ctrl_c(error):
                raise
            fact = fact_of(error)
            if checkpoint.state.digests:
                raise InputError(
                    f"the trainer cannot load {path}, whose files are as they were written: {fact}; mend the"
                    " cause, and go on with --resume"
                ) from error
            raise InputError(f"the trainer cannot load {path}: {fact}; {self._remedy(path)}") from error

    def _before(self, path: Path) -> Path | None:
        before = [each for each in self._finished() if int(each.name) < int(path.name)]
        return before[-1] if before else None

    def _remedy(self, path: Path) -> str:
        before = self._before(path)
        if before is None:
            return "restore it, or begin anew in another directory, as no checkpoint is before it"
        return f"delete {path} to go on from the one before, {before}"

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
                _delete(unfinished)
            new = self._root / f"{UNFINISHED}{secrets.token_hex(4)}"
            new.mkdir()
            write(new)
            (new / STATE).write_bytes(msgspec.json.encode(state))
            write_digests(new)
            for path in (*new.rglob("*"), new):
                _flush(path)
            new.rename(target)
            _flush(self._root)
            for old in self._finished()[: -self._keep]:
                _delete(old)
        except WRITE_ERRORS as error:
            if new is not None:
                shutil.rmtree(new, ignore_errors=True)
            raise OutputError(
                f"cannot write the checkpoint {target}: {error}; make room, then go on with --resume"
            ) from error
        return target

    def _finished(self) -> list[Path]:
        if not os.path.lexists(self._root):
            return []
        try:
            numbered = [path for path in self._root.iterdir() if path.name.isdecimal()]
        except OSError as error:
            raise InputError(
                f"{self._root} cannot be read: {describe_flaw(error)}; restore it, or begin anew in"
                " another directory"
            ) from error
        return sorted(numbered, key=lambda each: int(each.name))


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


def _read_state(path: Path) -> tuple[TrainingState, Any]:
    """Return the state in a checkpoint, also as it was written; raises InputError, without a remedy."""
    file = path / STATE
    raw = None
    try:
        raw = bytes_of_file(file)
        state, written = msgspec.json.decode(raw, type=TrainingState), msgspec.json.decode(raw)
    except (OSError, *UNREADABLE) as error:
        raise InputError(f"{file} is no state of training: {describe_flaw(error, raw)}") from error
    if state.iterations != int(path.name):
        raise InputError(
            f"{file} is damaged: it is of iteration {state.iterations:,}, and its directory is not"
        )
    return state, written


def _unknown_keys(written: Any, known: Any, prefix: str = "") -> list[str]:
    """Return the dotted names of what is written and not known."""
    if not isinstance(written, dict) or not isinstance(known, dict):
        return []
    found = [printable(f"{prefix}{key}", SHOWN) for key in written if key not in known]
    for key in written.keys() & known.keys():
        found += _unknown_keys(written[key], known[key], f"{prefix}{key}.")
    return sorted(found)


def _delete(path: Path) -> None:
    """Delete a directory with all that is in it; of a link, as to a checkpoint on another disk, the link."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def _flush(path: Path) -> None:
    """Wait until the disk holds a file, so that a rename never comes before it."""
    file = os.open(path, os.O_RDONLY)
    try:
        os.fsync(file)
    finally:
        os.close(file)
