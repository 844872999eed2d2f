"""Token ids and log-probs as arrays: 4 bytes for each, where a list takes some 35."""

from __future__ import annotations

from array import array
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    Ints = array[int]
    Floats = array[float]
else:
    Ints = Floats = array

__all__ = ["Logprobs", "Tokens", "packed", "unpacked"]


class _Like:
    """Makes an array equal to a list of the same values, and its parts and copies of its own kind."""

    __slots__ = ()

    def __eq__(self, other: object) -> bool:
        return bool(self.tolist() == other) if isinstance(other, list) else super().__eq__(other)

    def __ne__(self, other: object) -> bool:  # or else it is array's own, for which no list is equal
        return bool(self.tolist() != other) if isinstance(other, list) else super().__ne__(other)

    __hash__ = None  # type: ignore[assignment]

    def __getitem__(self, index: Any) -> Any:
        found = super().__getitem__(index)  # type: ignore[misc]
        return type(self)(found) if isinstance(index, slice) else found  # type: ignore[call-arg]

    def __copy__(self) -> Any:
        return self[:]

    def __deepcopy__(self, memo: object) -> Any:
        return self[:]

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.tolist(),)

    if TYPE_CHECKING:

        def tolist(self) -> list[Any]: ...


class Tokens(_Like, Ints):
    """Token ids, int32.  Equal to a list of the same ids; ``numpy.asarray`` of it copies nothing."""

    __slots__ = ()

    def __new__(cls, values: Iterable[int] = ()) -> Tokens:
        """Take these ids, or their bytes."""
        return super().__new__(cls, "i", values)  # type: ignore[return-value]


class Logprobs(_Like, Floats):
    """Log-probs in nats, float32, which is what engines compute.  Equal to a list of the same numbers."""

    __slots__ = ()

    def __new__(cls, values: Iterable[float] = ()) -> Logprobs:
        """Take these numbers, or their bytes."""
        return super().__new__(cls, "f", values)  # type: ignore[return-value]


def packed(value: object) -> bytes:
    """Return an array's bytes: a hook of msgspec's encoders."""
    if isinstance(value, Tokens | Logprobs):
        return value.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def unpacked(kind: type, value: Any) -> Any:
    """Return the array of these bytes, or of this list: a hook of msgspec's decoders."""
    if not issubclass(kind, Tokens | Logprobs):
        raise NotImplementedError(f"a {kind.__name__} cannot be received")
    try:
        return kind(value)
    except OverflowError as error:
        raise ValueError(str(error)) from error
