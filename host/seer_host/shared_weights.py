"""Weights in memory that a trainer shares with the engines of its machine: no file is written.

A buffer is a ``memfd``: memory without a name, which the kernel frees with the last process that holds it, so
SIGKILL leaves nothing behind.  Engines find it by way of the trainer's descriptors in ``/proc``.  Once
written it is sealed: from then on the kernel refuses every change, the trainer's too.  So an instance that
starts late reads what the others have loaded.
"""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from mmap import ACCESS_READ, mmap
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

import xxhash

from seer_core.errors import OutputError, SeerError
from seer_core.ports.weights import SHARED_MEMORY, WeightSpec

__all__ = [
    "SEALS",
    "SharedWeights",
    "TensorSlice",
    "buffer_source",
    "checksum_of",
    "digest_of",
    "digest_of_checksums",
    "new_buffer",
    "next_begin",
    "replacing",
    "seal",
    "write_at",
]

ALIGNED = 64
"""Tensors begin at multiples of so many bytes."""
SEALS = fcntl.F_SEAL_SEAL | fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_WRITE


_descriptors: set[int] = set()
"""Those of all buffers of this process."""


class TensorSlice(NamedTuple):
    """Where a tensor lies, in bytes; ``dtype`` is the name of torch or of safetensors."""

    name: str
    dtype: str
    shape: list[int]
    begin: int
    end: int


T = TypeVar("T")


class _Buffer(NamedTuple):
    descriptor: int
    source: WeightSpec
    digest: str


class SharedWeights:
    """A trainer's current weights in shared memory, for ``update_weights``; a context manager.

    Example::

        with SharedWeights() as shared, Session(config) as session:
            ...
            with shared.offer(model.named_parameters()) as source:
                session.update_weights(source)
    """

    def __init__(self) -> None:
        self._buffers: list[_Buffer] = []

    @property
    def digest(self) -> str:
        """The ``digest_of`` the weights offered last; empty before the first."""
        return self._buffers[-1].digest if self._buffers else ""

    def __enter__(self) -> SharedWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def offer(
        self, tensors: Iterable[tuple[str, Any]], adapter_config: Mapping[str, Any] | None = None
    ) -> Iterator[WeightSpec]:
        """Write torch tensors, named as in checkpoints, into new memory, and yield what names it.

        With PEFT's ``adapter_config`` they are an adapter, named as in its ``adapter_model.safetensors``.
        Whole weights to which adapters belong are offered by another ``SharedWeights``, or freed too early.

        The previous weights stay until the end of the ``with`` block, because an instance may start with them
        until the update is over.  Then they are freed; after an error of Seer the new ones are freed instead.
        After any other error, such as Ctrl-C, both stay until the next update, for engines may have either.

        Raises:
            OutputError: there is not enough memory.
        """
        new = _write(tensors)
        source = new.source
        if adapter_config is not None:
            source = WeightSpec(source.path, {**source.settings, "adapter_config": adapter_config})
        with replacing(self._buffers, new, _free_buffer):
            yield source

    def close(self) -> None:
        """Free the memory, once no engine reads it any more."""
        while self._buffers:
            _free_buffer(self._buffers.pop())


@contextmanager
def replacing(offered: list[T], new: T, free: Callable[[T], None]) -> Iterator[None]:
    """Put ``new`` in the place of what is ``offered`` at the end of the ``with`` block, and ``free`` that.

    After an error of Seer the new one is freed instead.  After any other, both stay: engines may have either.
    """
    try:
        yield
    except SeerError:
        free(new)
        raise
    except BaseException:
        offered.append(new)
        raise
    while offered:
        free(offered.pop())
    offered.append(new)


def _free_buffer(buffer: _Buffer) -> None:
    _free(buffer.descriptor)


def _free(descriptor: int) -> None:
    """Close a buffer; a forked process has closed its parent's already."""
    if descriptor in _descriptors:
        _descriptors.remove(descriptor)
        os.close(descriptor)


def _free_all() -> None:
    """Close all buffers in a forked process, of a data loader say, so that the parent can free them."""
    while _descriptors:
        os.close(_descriptors.pop())


os.register_at_fork(after_in_child=_free_all)


def digest_of(tensors: Mapping[str, tuple[Sequence[int], Any]]) -> str:
    """Return a digest over names, shapes and bytes, in order of names, in 64 hexadecimal digits."""
    names = sorted(tensors)
    with ThreadPoolExecutor() as pool:
        checksums = pool.map(checksum_of, (tensors[name][1] for name in names))
        return digest_of_checksums(
            {name: (tensors[name][0], each) for name, each in zip(names, checksums, strict=True)}
        )


def checksum_of(values: Any) -> str:
    """Return the checksum of a tensor's bytes: XXH3 of 128 bits, 32 hexadecimal digits.

    It keeps pace with memory, and notices every accident; it is no proof against forgery.
    """
    return xxhash.xxh3_128_hexdigest(values)


def digest_of_checksums(checksums: Mapping[str, tuple[Sequence[int], str]]) -> str:
    """Return the ``digest_of`` tensors of which shapes and ``checksum_of`` are given, by name."""
    lines = [f"{name} {[*checksums[name][0]]} {checksums[name][1]}\n" for name in sorted(checksums)]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _write(tensors: Iterable[tuple[str, Any]]) -> _Buffer:
    descriptor = new_buffer()
    _descriptors.add(descriptor)
    try:
        table: list[TensorSlice] = []
        for name, tensor in tensors:
            begin = next_begin(table)
            end = begin + _put(descriptor, tensor, begin)
            dtype = str(tensor.dtype).removeprefix("torch.")
            table.append(TensorSlice(name, dtype, [*tensor.shape], begin, end))
        digest = seal(descriptor, table)
    except BaseException as error:
        _free(descriptor)
        if isinstance(error, OSError):
            raise OutputError(
                f"the weights cannot be put into shared memory: {error}; free some, or use a directory"
            ) from error
        raise
    return _Buffer(descriptor, buffer_source(descriptor, digest, table), digest)


def new_buffer() -> int:
    """Return the descriptor of new memory without a name, which ``seal`` can seal."""
    return os.memfd_create("seer-weights", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)


def next_begin(table: Sequence[TensorSlice]) -> int:
    """Return where the next tensor begins in a buffer."""
    return -(-table[-1].end // ALIGNED) * ALIGNED if table else 0


def seal(descriptor: int, table: Sequence[TensorSlice]) -> str:
    """Write a buffer's digest behind its tensors, let nothing change any more, and return the digest."""
    end = max(table[-1].end if table else 0, 1)  # nothing at all cannot be mapped
    os.ftruncate(descriptor, end)
    # A mapping that outlives this function would keep the buffer from being sealed.
    with mmap(descriptor, end, access=ACCESS_READ) as memory, memoryview(memory) as values:
        digest = digest_of({each.name: (each.shape, values[each.begin : each.end]) for each in table})
    write_at(descriptor, digest.encode(), end)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
    return digest


def buffer_source(descriptor: int, digest: str, table: Sequence[TensorSlice]) -> WeightSpec:
    """Return what engines of this machine open a sealed buffer of this process by.

    In the table types have torch's names.
    """
    area = f"/proc/{os.getpid()}/fd/{descriptor}"
    return WeightSpec(SHARED_MEMORY, {"area": area, "digest": digest, "table": table})


def _put(descriptor: int, tensor: Any, begin: int) -> int:
    """Write a tensor's values and return their size in bytes."""
    values = tensor.detach().cpu().contiguous()
    size: int = values.nbytes
    if size and not values.data_ptr():
        raise OutputError("a tensor is not all in this process; gather it first: full_tensor()")
    if size:
        write_at(descriptor, (ctypes.c_ubyte * size).from_address(values.data_ptr()), begin)
    return size


def write_at(descriptor: int, values: Any, begin: int) -> None:
    """Write all of these bytes into a buffer."""
    left = memoryview(values)
    while left:
        written = os.pwrite(descriptor, left, begin)
        left, begin = left[written:], begin + written
