"""How new weights get from the trainer to the engines: by a directory, or in memory that they share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Protocol

from seer_core import SharedWeights
from seer_core.errors import ConfigError, OutputError
from seer_core.shared_weights import digest_of
from seer_core.weights import WeightSpec
from seer_rl.checkpoints import WRITING
from seer_rl.config import TrainTable
from seer_rl.trainer import SharingTrainer, Trainer

__all__ = ["ByDirectory", "BySharedMemory", "Way", "way_of"]


class Way(Protocol):
    """A way from a trainer to the engines."""

    def offer(self) -> AbstractContextManager[Path | WeightSpec]:
        """Give what engines can load the trainer's weights from, which they do in the ``with`` block.

        Raises:
            OutputError: there is no room.
        """

    def digest(self) -> str:
        """Return the ``digest_of`` the weights offered last, the same whichever way they went."""


@contextmanager
def way_of(table: TrainTable, trainer: Trainer, out: Path) -> Iterator[Way]:
    """Open the way that ``[train].weights`` names; engines may need what it offered until it is closed.

    Raises:
        ConfigError: the trainer cannot go that way.
    """
    if table.weights == "directory":
        yield ByDirectory(trainer, out / "weights")
        return
    if not isinstance(trainer, SharingTrainer):
        raise ConfigError(
            f'[train].weights = "shared_memory" needs a trainer with a method `tensors`, which'
            f' {table.trainer!r} has not; use weights = "directory"'
        )
    with SharedWeights() as shared:
        yield BySharedMemory(trainer, shared)


class ByDirectory:
    """A directory into which the trainer exports its weights."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self._trainer = trainer
        self._directory = directory

    @contextmanager
    def offer(self) -> Iterator[Path]:
        """Export, over what is there."""
        try:
            self._directory.mkdir(exist_ok=True)
            self._trainer.export(self._directory)
        except WRITING as error:
            raise OutputError(f"cannot write the weights to {self._directory}: {error}; make room") from error
        yield self._directory

    def digest(self) -> str:
        """Read the files."""
        tensors: dict[str, tuple[list[int], Any]] = {}
        for path in self._directory.glob("*.safetensors"):
            with path.open("rb") as file:
                values = memoryview(mmap(file.fileno(), 0, access=ACCESS_READ))
            begin = 8 + int.from_bytes(values[:8], "little")
            for name, about in json.loads(bytes(values[8:begin])).items():
                if name != "__metadata__":
                    first, end = about["data_offsets"]
                    tensors[name] = about["shape"], values[begin + first : begin + end]
        return digest_of(tensors)


class BySharedMemory:
    """Memory of this process; no file is written."""

    def __init__(self, trainer: SharingTrainer, shared: SharedWeights) -> None:
        self._trainer = trainer
        self._shared = shared

    def offer(self) -> AbstractContextManager[WeightSpec]:
        """Copy the trainer's tensors."""
        return self._shared.offer(self._trainer.tensors())

    def digest(self) -> str:
        """Return what was computed when they were copied."""
        return self._shared.digest
