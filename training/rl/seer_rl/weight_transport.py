"""How new weights get from the trainer to the engines: by a directory, or in memory that they share."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from mmap import ACCESS_READ, mmap
from pathlib import Path
from typing import Any, Protocol

from seer_host.shared_weights import SharedWeights, digest_of

from seer_core.errors import ConfigError, OutputError
from seer_core.ports.contracts import implemented
from seer_core.ports.weights import WeightSpec
from seer_rl.checkpoints import WRITE_ERRORS
from seer_rl.config import TrainTable
from seer_rl.trainer import Trainer

__all__ = ["DirectoryTransport", "SharedMemoryTransport", "WeightTransport", "open_transport"]


class WeightTransport(Protocol):
    """Brings weights from a trainer to the engines."""

    def publish(self) -> AbstractContextManager[Path | WeightSpec]:
        """Yield what engines can load the trainer's weights from, which they do in the ``with`` block.

        Raises:
            OutputError: there is no room.
        """

    def digest(self) -> str:
        """Return the ``digest_of`` the weights published last, the same for every transport."""


@contextmanager
def open_transport(table: TrainTable, trainer: Trainer, out: Path) -> Iterator[WeightTransport]:
    """Open the transport that ``[train].weights`` names; engines may load what it published until it closes.

    Raises:
        ConfigError: the trainer cannot use it.
    """
    if table.weights == "directory":
        yield DirectoryTransport(trainer, out / "weights")
        return
    if implemented(trainer, "tensors") is None:
        raise ConfigError(
            f'[train].weights = "shared_memory" needs a trainer with a method `tensors`, which'
            f' {table.trainer!r} has not; use weights = "directory"'
        )
    with SharedWeights() as shared:
        yield SharedMemoryTransport(trainer, shared)


class DirectoryTransport:
    """A directory into which the trainer exports its weights."""

    def __init__(self, trainer: Trainer, directory: Path) -> None:
        self._trainer = trainer
        self._directory = directory

    @contextmanager
    def publish(self) -> Iterator[Path]:
        """Export the weights over those before."""
        try:
            self._directory.mkdir(exist_ok=True)
            self._trainer.export(self._directory)
        except WRITE_ERRORS as error:
            raise OutputError(f"cannot write the weights to {self._directory}: {error}; make room") from error
        yield self._directory

    def digest(self) -> str:
        """Return the digest of the tensors in the directory's files."""
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


class SharedMemoryTransport:
    """Memory of this process that engines on its machine map; no file is written."""

    def __init__(self, trainer: Trainer, shared: SharedWeights) -> None:
        self._trainer = trainer
        self._shared = shared

    def publish(self) -> AbstractContextManager[WeightSpec]:
        """Copy the trainer's tensors."""
        config = implemented(self._trainer, "adapter_config")
        return self._shared.offer(self._trainer.tensors(), None if config is None else config())

    def digest(self) -> str:
        """Return the digest that was computed when the tensors were copied."""
        return self._shared.digest
