"""Token ids and log-probs as arrays: 4 bytes for each, where a list takes some 35."""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, overload

import msgspec

if TYPE_CHECKING:
    Ints = array[int]
    Floats = array[float]
else:
    Ints = Floats = array

__all__ = ["LEAST_LOGPROB", "Logprobs", "PromptLogprobs", "Tokens", "TopLogprobs", "packed", "unpacked"]


LEAST_LOGPROB = -9999.0
"""Stands for the log-prob of a token that is impossible, as at vLLM's server: JSON has no infinity."""


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


class TopLogprobs:
    """The most probable tokens at each of some places, and their log-probs in nats, the most probable first.

    ``width`` of them for each place stand one after another in ``token_ids`` and ``logprobs``.  An index
    gives the pairs of token and log-prob at a place, a slice the same of some places.
    """

    __slots__ = ("logprobs", "token_ids", "width")

    def __init__(self, width: int, token_ids: Iterable[int] = (), logprobs: Iterable[float] = ()) -> None:
        self.width = width
        self.token_ids = Tokens(token_ids)
        self.logprobs = Logprobs(logprobs)
        if len(self.token_ids) != len(self.logprobs) or len(self.token_ids) % max(width, 1):
            raise ValueError(
                f"{len(self.token_ids)} tokens and {len(self.logprobs)} log-probs, {width} at a place"
            )

    @classmethod
    def of(cls, places: Sequence[Sequence[tuple[int, float]]]) -> TopLogprobs:
        """Return the same as these pairs, of which each place has as many."""
        pairs = [pair for place in places for pair in place]
        width = len(places[0]) if places else 0
        if any(len(place) != width for place in places):
            raise ValueError("places have different numbers of tokens")
        return cls(width, [token for token, _ in pairs], [logprob for _, logprob in pairs])

    def fits(self, width: int, places: int) -> bool:
        """Return whether there are so many tokens at each of so many places."""
        return len(self) == places and self.width in (width, 0)

    def extend(self, other: TopLogprobs) -> None:
        """Append further places."""
        self.token_ids.extend(other.token_ids)
        self.logprobs.extend(other.logprobs)

    def __len__(self) -> int:
        return len(self.token_ids) // self.width if self.width else 0

    @overload
    def __getitem__(self, index: int) -> list[tuple[int, float]]: ...

    @overload
    def __getitem__(self, index: slice) -> TopLogprobs: ...

    def __getitem__(self, index: int | slice) -> list[tuple[int, float]] | TopLogprobs:
        places = range(len(self))[index]
        if isinstance(places, range):
            part = slice(places.start * self.width, places.stop * self.width)
            return TopLogprobs(self.width, self.token_ids[part], self.logprobs[part])
        part = slice(places * self.width, (places + 1) * self.width)
        return list(zip(self.token_ids[part], self.logprobs[part], strict=True))

    def __iter__(self) -> Iterator[list[tuple[int, float]]]:
        return (self[place] for place in range(len(self)))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TopLogprobs) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"TopLogprobs.of({list(self)})"


class PromptLogprobs(msgspec.Struct, frozen=True, gc=False):
    """The log-probs of a prompt's tokens; its first token, which nothing comes before, has none."""

    logprobs: Logprobs
    """The log-prob of each of the others, in nats."""
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens in the place of each of them, where the prompt asks for them."""

    def fits(self, width: int, prompt_tokens: int) -> bool:
        """Return whether they are of a prompt of so many tokens, with so many others for each."""
        places, tops = prompt_tokens - 1, self.top_logprobs
        return len(self.logprobs) == places and (tops.fits(width, places) if tops else not (width and places))


def packed(value: object) -> bytes | tuple[int, bytes, bytes]:
    """Return an array's bytes: a hook of msgspec's encoders."""
    if isinstance(value, Tokens | Logprobs):
        return value.tobytes()
    if isinstance(value, TopLogprobs):
        return value.width, value.token_ids.tobytes(), value.logprobs.tobytes()
    raise NotImplementedError(f"a {type(value).__name__} cannot be sent")


def unpacked(kind: type, value: Any) -> Any:
    """Return the array of these bytes, or of this list: a hook of msgspec's decoders."""
    if not issubclass(kind, Tokens | Logprobs | TopLogprobs):
        raise NotImplementedError(f"a {kind.__name__} cannot be received")
    try:
        if issubclass(kind, TopLogprobs):
            if not isinstance(value, list):
                raise TypeError("expected a list")
            return kind(*value) if value and isinstance(value[0], int) else kind.of(value)
        return kind(value)
    except OverflowError as error:
        raise ValueError(str(error)) from error
