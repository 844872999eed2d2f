"""Weights in memory that the server holds and its engines map: sent by a client, or shared by one."""

from __future__ import annotations

import asyncio
import fcntl
import math
import os
import re
from collections.abc import AsyncIterator

import attrs
import msgspec
from seer_host.shared_weights import (
    SEALS,
    TensorSlice,
    buffer_source,
    new_buffer,
    next_begin,
    seal,
    write_at,
)

from seer_core.errors import OutputError, PromptError, printable
from seer_core.ports.weights import WeightSpec

__all__ = ["SharedBuffer", "open_buffer", "receive_buffer"]

LONGEST_HEADER = 100 << 20
"""Bytes of a safetensors file's header, as its own reader has it."""

DTYPES = {
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
}
"""What safetensors calls types of values, and torch; and their bytes."""


class HeaderEntry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor in a safetensors file's header."""

    dtype: str
    shape: list[int]
    data_offsets: tuple[int, int]


@attrs.define(eq=False)
class SharedBuffer:
    """Sealed memory that this process holds, until it is closed."""

    descriptor: int
    source: WeightSpec

    def close(self) -> None:
        """Close the descriptor; the kernel frees the memory once no engine maps it."""
        os.close(self.descriptor)


def open_buffer(path: str, table: list[TensorSlice], digest: str) -> SharedBuffer:
    """Open memory that a process on this machine has sealed; that process may end then.

    Raises:
        PromptError: it cannot be opened, may still change, or has no room for its table.
    """
    if not re.fullmatch(r"/proc/\d+/fd/\d+", path):
        raise PromptError("shared.path must be /proc/PID/fd/NUMBER")
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise PromptError(
            f"{path} cannot be opened ({error}): the client must be alive, on the server's machine and of its"
            " user; otherwise send the weights"
        ) from error
    try:
        sealed = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & SEALS == SEALS
        size = os.fstat(descriptor).st_size - len(digest)
        if not sealed or not digest or os.pread(descriptor, len(digest), size) != digest.encode():
            raise PromptError(
                f"{path} is not sealed, or does not end with its digest; share the weights again"
            )
        _check(table, size)
        return SharedBuffer(descriptor, _source(descriptor, digest, table))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise PromptError(f"{path} is no memory of the kind that is shared: {error}") from error
        raise


async def receive_buffer(stream: AsyncIterator[bytes]) -> SharedBuffer:
    """Put safetensors files that come one right after the other into memory.

    Raises:
        PromptError: they are none, are cut, or hold a tensor twice.
        OutputError: there is not enough memory.
    """
    descriptor = new_buffer()
    try:
        table = await _read_files(_Reader(stream), descriptor)
        digest = await asyncio.to_thread(seal, descriptor, table)
        return SharedBuffer(descriptor, _source(descriptor, digest, table))
    except BaseException as error:
        os.close(descriptor)
        if isinstance(error, OSError):
            raise OutputError(f"the weights cannot be put into memory: {error}; free some") from error
        raise


async def _read_files(reader: _Reader, descriptor: int) -> list[TensorSlice]:
    table: list[TensorSlice] = []
    names: set[str] = set()
    while await reader.more():
        length = int.from_bytes(await reader.take(8), "little")
        if length > LONGEST_HEADER:
            raise PromptError("the body is no safetensors: its header would be too long")
        entries = _entries(await reader.take(length))
        _require_memory(entries[-1][1].data_offsets[1] if entries else 0)
        at = 0
        for name, entry in entries:
            begin, end = entry.data_offsets
            if begin != at or name in names:
                raise PromptError(
                    f"tensor {printable(name, 100)!r} comes twice, or not where the last one ends"
                )
            names.add(name)
            start = next_begin(table)
            table.append(TensorSlice(name, entry.dtype, entry.shape, start, start + end - begin))
            _check(table[-1:], start + end - begin)
            async for piece in reader.pieces(end - begin):
                write_at(descriptor, piece, start)
                start += len(piece)
            at = end
    if not table:
        raise PromptError("the body holds no tensor; send safetensors")
    return table


def _entries(header: bytes) -> list[tuple[str, HeaderEntry]]:
    """Return a file's tensors in the order of their bytes."""
    try:
        found = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        found.pop("__metadata__", None)
        entries = [(name, msgspec.json.decode(value, type=HeaderEntry)) for name, value in found.items()]
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(printable(f"the body is no safetensors: {error}", 300)) from None
    return sorted(entries, key=lambda each: each[1].data_offsets)


def _check(table: list[TensorSlice], size: int) -> None:
    """Raise PromptError unless the tensors lie within so many bytes and have the length of their shapes."""
    for name, dtype, shape, begin, end in table:
        width = DTYPES.get(dtype)
        if width is None or min(shape, default=0) < 0 or end - begin != math.prod(shape) * width[1]:
            raise PromptError(
                f"tensor {printable(name, 100)!r}: {end - begin} bytes are none of {printable(dtype, 20)!r}"
                f" and shape {printable(str(shape), 100)}"
            )
        if not 0 <= begin <= end <= size:
            raise PromptError(f"tensor {printable(name, 100)!r} lies beyond its memory")


def _source(descriptor: int, digest: str, table: list[TensorSlice]) -> WeightSpec:
    rows = [TensorSlice(each.name, DTYPES[each.dtype][0], *each[2:]) for each in table]
    return buffer_source(descriptor, digest, rows)


def _require_memory(wanted: int) -> None:
    """Raise OutputError if the machine has not so many bytes left."""
    with open("/proc/meminfo", encoding="ascii") as file:
        found = re.search(r"MemAvailable:\s+(\d+) kB", file.read())
    if found is not None and wanted > int(found[1]) * 1024:
        raise OutputError(
            f"{wanted:,} bytes of weights, and the server's machine has {int(found[1]):,} kB left"
        )


class _Reader:
    """Takes given numbers of bytes from a stream."""

    def __init__(self, stream: AsyncIterator[bytes]) -> None:
        self._stream = stream
        self._left = memoryview(b"")

    async def more(self) -> bool:
        """Return whether there is anything left."""
        while not self._left:
            piece = await anext(self._stream, None)
            if piece is None:
                return False
            self._left = memoryview(piece)
        return True

    async def pieces(self, count: int) -> AsyncIterator[memoryview]:
        """Yield so many bytes, in pieces.

        Raises:
            PromptError: there are fewer.
        """
        while count:
            if not await self.more():
                raise PromptError("the body is cut; send all of it")
            piece, self._left = self._left[:count], self._left[count:]
            count -= len(piece)
            yield piece

    async def take(self, count: int) -> bytes:
        """Return so many bytes; raises as ``pieces``."""
        return b"".join([bytes(piece) async for piece in self.pieces(count)])
