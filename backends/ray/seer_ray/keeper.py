"""A node's part in new weights: it receives them once, in memory, while workers of the node load them.

Every file becomes a sealed ``memfd`` of this process, and workers find it by way of ``/proc``: a trainer's
shared memory under one path, a directory of safetensors as links.  So the sources that workers have for
weights of their own machine read them unchanged, nothing is written to a disk, and the kernel frees all of it
with this process.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
from contextlib import ExitStack
from mmap import ACCESS_READ, mmap
from pathlib import Path

from msgspec import Struct
from seer_host.machine_memory import available_bytes
from seer_host.scratch import Scratch
from seer_host.shared_weights import SEALS, digest_of, new_buffer
from seer_host.weight_copies import NONCE, digest_of_files, weight_files
from seer_worker.handshake import ID_BYTES
from seer_worker.process.remote import connect

from seer_core.errors import EngineError
from seer_core.ports.weights import DIRECTORY

__all__ = ["Cargo", "Fetched", "WeightKeeper", "hosts"]

SILENCE_S = 30.0
"""How long the other side may send nothing, or take nothing."""
CHUNK_BYTES = 1 << 22


class Cargo(Struct, frozen=True):
    """Weights on the runtime's machine, as a node is asked for them.

    ``place`` is a directory, or the path of shared memory, and ``files`` has the sizes in bytes by name, in
    the order in which they are sent.  ``nonce`` is the copy's, empty without one; ``table`` that of shared
    memory.
    """

    kind: str
    place: str
    digest: str
    nonce: str
    files: dict[str, int]
    table: list[tuple[str, str, list[int], int, int]]

    @property
    def size_bytes(self) -> int:
        """The size of all files together."""
        return sum(self.files.values())


class Fetched(Struct, frozen=True):
    """Where weights lie on a node; ``flaw`` is why they do not."""

    place: str = ""
    flaw: str = ""


class WeightKeeper:
    """Keeps weights, each under the key of its delivery, until they are freed; for one event loop."""

    def __init__(self) -> None:
        self._wanted: set[str] = set()
        self._kept: dict[str, ExitStack] = {}

    async def fetch(self, key: str, cargo: Cargo, address: tuple[str, int], secret: bytes) -> Fetched:
        """Receive weights from the runtime's port, check and seal them."""
        self._wanted.add(key)
        try:
            place, held = await asyncio.to_thread(_receive, cargo, address, secret)
        except (OSError, EngineError) as error:
            self._wanted.discard(key)
            return Fetched(flaw=str(error))
        if key in self._wanted:
            self._kept[key] = held
        else:
            held.close()
        return Fetched(place)

    def free(self, key: str) -> None:
        """Let go of weights; those that a process has mapped stay for that process."""
        self._wanted.discard(key)
        if held := self._kept.pop(key, None):
            held.close()


def hosts(cargo: Cargo) -> bool:
    """Return whether the same weights lie in the same place on this machine, which a path does not prove."""
    try:
        if cargo.kind == DIRECTORY:
            if cargo.nonce:
                return Path(cargo.place, NONCE).read_text() == cargo.nonce
            return digest_of_files(weight_files(Path(cargo.place))) == cargo.digest
        with open(cargo.place, "rb", opener=_open_at_once) as file:
            digest = cargo.digest.encode()
            end = os.fstat(file.fileno()).st_size - len(digest)
            sealed = fcntl.fcntl(file, fcntl.F_GET_SEALS) & SEALS == SEALS
            return sealed and os.pread(file.fileno(), len(digest), end) == digest
    except (OSError, UnicodeDecodeError):
        return False


def _open_at_once(path: str, flags: int) -> int:
    """Open a file, which may be a pipe that no process writes to."""
    return os.open(path, flags | os.O_NONBLOCK)


def _receive(cargo: Cargo, address: tuple[str, int], secret: bytes) -> tuple[str, ExitStack]:
    """Return where the weights lie now, and what keeps them there."""
    free = available_bytes()
    if cargo.size_bytes > free:
        raise EngineError(
            f"it has {free / 2**30:.1f} GiB of memory left, and they take {cargo.size_bytes / 2**30:.1f};"
            " free some, or update from a directory with [seer].weights_dir on a file system of all nodes"
        )
    with ExitStack() as undo:
        connection = connect(*address, secret[:ID_BYTES], secret[ID_BYTES:])
        descriptors: dict[str, int] = {}
        with connection:
            connection.settimeout(SILENCE_S)
            for name, size in cargo.files.items():
                descriptor = new_buffer()
                undo.callback(os.close, descriptor)
                _fill(descriptor, connection, size)
                descriptors[name] = descriptor
        paths = {name: f"/proc/{os.getpid()}/fd/{each}" for name, each in descriptors.items()}
        if cargo.kind == DIRECTORY:
            scratch = Scratch("seer-node-weights-")
            undo.callback(scratch.close)
            place = str(scratch.path)
            for name, path in paths.items():
                (scratch.path / name).symlink_to(path)
            digest = digest_of_files(weight_files(scratch.path))
        else:
            [place] = paths.values()
            [descriptor] = descriptors.values()
            digest = _digest_within(descriptor, cargo)
        if digest != cargo.digest:
            raise EngineError(
                f"those that arrived have the digest {digest}, not {cargo.digest}; update the weights again,"
                " and leave them as they are meanwhile"
            )
        for descriptor in descriptors.values():
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, SEALS)
        return place, undo.pop_all()


def _fill(descriptor: int, connection: socket.socket, size: int) -> None:
    """Write so many bytes of a connection into a buffer."""
    os.ftruncate(descriptor, size)
    if not size:
        return
    # A mapping that outlives this function would keep the buffer from being sealed.
    with mmap(descriptor, size) as memory, memoryview(memory) as values:
        begin = 0
        while begin < size:
            with values[begin : begin + CHUNK_BYTES] as free:
                got = connection.recv_into(free)
            if not got:
                raise EngineError(f"the runtime sent {begin} bytes of {size}")
            begin += got


def _digest_within(descriptor: int, cargo: Cargo) -> str:
    """Return the digest of a buffer's tensors."""
    with mmap(descriptor, 0, access=ACCESS_READ) as memory, memoryview(memory) as values:
        return digest_of({name: (shape, values[begin:end]) for name, _, shape, begin, end in cargo.table})
