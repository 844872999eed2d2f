"""Named tensors as bytes: safetensors for a connection, or memory that the server's machine shares."""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import xxhash

from seer_client.protocol import ClientError

__all__ = ["NamedTensors", "pieces", "shared"]

NamedTensors = Iterable[tuple[str, Any]]
"""Names as in checkpoints with tensors: torch's, numpy's, or ``(dtype, shape, buffer)``, such as "BF16"."""

DTYPES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}
"""What torch and numpy call types of values, and safetensors."""

PIECE = 1 << 20
"""Bytes that are sent at a time."""
ALIGNED = 64


class _TensorBytes(NamedTuple):
    """A tensor's values; ``owner`` keeps their memory."""

    dtype: str
    shape: list[int]
    buffer: memoryview
    owner: object


def pieces(tensors: NamedTensors) -> Iterator[bytes]:
    """Yield each tensor as a small safetensors file, in pieces; one after the other they are a body."""
    for name, tensor in tensors:
        values = _values(name, tensor)
        offsets = [0, values.buffer.nbytes]
        header = {name: {"dtype": values.dtype, "shape": values.shape, "data_offsets": offsets}}
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        yield len(text).to_bytes(8, "little") + text
        for begin in range(0, values.buffer.nbytes, PIECE):
            yield bytes(values.buffer[begin : begin + PIECE])


@contextmanager
def shared(tensors: NamedTensors) -> Iterator[dict[str, Any]]:
    """Put tensors into memory without a name, and yield where a server on this machine finds them.

    It is a sealed ``memfd``, which no process can change; the server keeps it open itself.

    Raises:
        ClientError: there is not enough memory.
    """
    import fcntl  # not everywhere

    descriptor = os.memfd_create("seer-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        table: list[tuple[str, str, list[int], int, int]] = []
        lines: dict[str, str] = {}
        end = 0
        for name, tensor in tensors:
            values = _values(name, tensor)
            begin = -(-end // ALIGNED) * ALIGNED
            end = begin + values.buffer.nbytes
            _write(descriptor, values.buffer, begin)
            table.append((name, values.dtype, values.shape, begin, end))
            lines[name] = f"{name} {values.shape} {xxhash.xxh3_128_hexdigest(values.buffer)}\n"
        digest = hashlib.sha256("".join(lines[name] for name in sorted(lines)).encode()).hexdigest()
        _write(descriptor, memoryview(digest.encode()), max(end, 1))
        fcntl.fcntl(
            descriptor,
            fcntl.F_ADD_SEALS,
            fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE,
        )
        yield {"path": f"/proc/{os.getpid()}/fd/{descriptor}", "tensors": table, "digest": digest}
    except OSError as error:
        raise ClientError(
            f"the weights cannot be put into shared memory: {error}; free some, or send them"
        ) from error
    finally:
        os.close(descriptor)


def _write(descriptor: int, values: memoryview, begin: int) -> None:
    while values:
        written = os.pwrite(descriptor, values, begin)
        values, begin = values[written:], begin + written


def _values(name: str, tensor: Any) -> _TensorBytes:
    """Return what a tensor holds, torch's where it lies and others as they give it."""
    if isinstance(tensor, tuple):
        dtype, shape, buffer = tensor
        return _TensorBytes(dtype, [int(each) for each in shape], memoryview(buffer).cast("B"), buffer)
    kind = str(tensor.dtype).removeprefix("torch.")
    if kind not in DTYPES:
        raise ClientError(
            f"tensor {name!r} is of type {tensor.dtype}; convert it to one of {', '.join(DTYPES)}"
        )
    shape = [int(each) for each in tensor.shape]
    if hasattr(tensor, "data_ptr"):
        values = tensor.detach().cpu().contiguous()
        size = values.numel() * values.element_size()
        if size and not values.data_ptr():
            raise ClientError(f"tensor {name!r} is not all in this process; gather it first: full_tensor()")
        memory = (ctypes.c_ubyte * size).from_address(values.data_ptr()) if size else b""
        return _TensorBytes(DTYPES[kind], shape, memoryview(memory), values)
    buffer = tensor.tobytes()
    return _TensorBytes(DTYPES[kind], shape, memoryview(buffer), buffer)
