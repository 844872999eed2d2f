"""The messages between the trainer's process and its ranks, in the frames of ``seer_host.frames``."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any, Literal, Self

import msgspec
import numpy as np

from seer_core.errors import ConfigError
from seer_core.model.arrays import Logprobs, Tokens
from seer_rl.config import TrainTable
from seer_rl.errors import TrainError
from seer_rl.trainer import Sample

__all__ = [
    "AddSample",
    "Broke",
    "CallLearner",
    "Done",
    "FromRank",
    "Raised",
    "RankProgress",
    "SendTensors",
    "StartRank",
    "TensorAssembler",
    "TensorPiece",
    "ToRank",
    "Train",
    "tensor_pieces",
]

PIECE_BYTES = 16 << 20

RAISED = {"ConfigError": ConfigError, "TrainError": TrainError}


class StartRank(msgspec.Struct, frozen=True, tag=True):
    """The first message: meet the other ranks and read the weights in the directory ``model``."""

    table: TrainTable
    model: str
    seed: int


class AddSample(msgspec.Struct, frozen=True, tag=True):
    """A sample of the next ``Train``; the only message that is not answered."""

    prompt: Tokens
    response: Tokens
    logprobs: Logprobs
    advantage: float
    loss_mask: bytes | None = None

    @classmethod
    def of(cls, sample: Sample) -> Self:
        """Return the message for a sample."""
        return cls(
            Tokens(sample.prompt),
            Tokens(sample.response),
            Logprobs(sample.logprobs),
            sample.advantage,
            sample.loss_mask,
        )

    @property
    def sample(self) -> Sample:
        """The sample that this was made of."""
        return Sample(self.prompt, self.response, self.logprobs, self.advantage, self.loss_mask)


class Train(msgspec.Struct, frozen=True, tag=True):
    """Train on the samples added since the last ``Train``; answered with metrics and two arrays."""


class SendTensors(msgspec.Struct, frozen=True, tag=True):
    """Send the weights that this rank would export."""


class CallLearner(msgspec.Struct, frozen=True, tag=True):
    """Call this method of ``Learner`` with a directory."""

    method: Literal["export", "save", "load"]
    directory: str


ToRank = StartRank | AddSample | Train | SendTensors | CallLearner


class RankProgress(msgspec.Struct, frozen=True, tag=True):
    """The rank has got a step further."""


class TensorPiece(msgspec.Struct, frozen=True, tag=True):
    """Consecutive bytes of an array; the pieces of one array follow each other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Done(msgspec.Struct, frozen=True, tag=True):
    """The rank has done what it was asked for; the arrays came before."""

    metrics: dict[str, int | float] = {}


class Raised(msgspec.Struct, frozen=True, tag=True):
    """The rank refused or could not do what it was asked for, and goes on."""

    kind: str
    text: str
    number: int | None = None
    file: str | None = None

    @classmethod
    def of(cls, error: Exception) -> Self:
        """Return the message for a ``SeerError`` or an ``OSError``."""
        if isinstance(error, OSError) and error.strerror:
            file = None if error.filename is None else str(error.filename)
            return cls("OSError", error.strerror, error.errno, file)
        kind = "OSError" if isinstance(error, OSError) else type(error).__name__
        return cls(kind, str(error))

    @property
    def error(self) -> Exception:
        """The error to raise in the trainer's process."""
        if self.kind == "OSError":
            return OSError(self.text) if self.number is None else OSError(self.number, self.text, self.file)
        return RAISED.get(self.kind, TrainError)(self.text)


class Broke(msgspec.Struct, frozen=True, tag=True):
    """The rank failed unexpectedly, or because another rank did."""

    text: str


FromRank = RankProgress | TensorPiece | Done | Raised | Broke


def tensor_pieces(name: str, array: np.ndarray[Any, Any]) -> Iterator[TensorPiece]:
    """Yield an array in messages of at most ``PIECE_BYTES``; at least one."""
    data = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
    for start in range(0, max(1, data.size), PIECE_BYTES):
        yield TensorPiece(name, array.dtype.str, array.shape, data[start : start + PIECE_BYTES].tobytes())


class TensorAssembler:
    """Puts arrays together again."""

    def __init__(self) -> None:
        self._arrays: dict[str, tuple[TensorPiece, bytearray]] = {}

    def add(self, piece: TensorPiece) -> None:
        """Append the next bytes of an array."""
        self._arrays.setdefault(piece.name, (piece, bytearray()))[1].extend(piece.data)

    def arrays(self) -> dict[str, np.ndarray[Any, Any]]:
        """Return the arrays by name, in the order of their first pieces."""
        return {
            name: np.frombuffer(data, first.dtype, prod(first.shape)).reshape(first.shape)
            for name, (first, data) in self._arrays.items()
        }
