"""Weights sent by collectives of torch: the trainer is rank 0 of a process group, engines are the others.

A process that wants the weights asks for a pass.  One pass serves all that ask at about the same time: the
trainer broadcasts the memory of ``SharedWeights`` from the first byte to the last, in pieces of whole
tensors.  All passes are alike, so the checks of an update, its load, and an instance that starts later take
one each.  A process group lives for one pass, so a process that dies breaks that pass and no other.
"""

from __future__ import annotations

import itertools
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from types import TracebackType
from typing import Any

import structlog
import torch
import torch.distributed
from seer_host.shared_weights import TensorSlice, checksum_of, digest_of_checksums, replacing

from seer_core.errors import ConfigError, EngineError
from seer_core.ports.weights import BROADCAST, WeightSpec
from seer_worker.weights.shared_weights import SharedMemory

__all__ = ["Broadcast", "BroadcastWeights"]

log = structlog.get_logger("seer")

distributed: Any = torch.distributed
"""Untyped, for its annotations leave out much of what it has."""

GATHER_S = 0.1
"""Seconds that a pass waits for further readers."""
CONNECT_S = 30
LIMIT_S = 300
"""Seconds that a reader waits for its pass, and within a pass for the slowest of all at each piece."""
READERS = "readers"
"""The key of the store that counts the passes asked for; the number before is a reader's own."""


class BroadcastWeights:
    """Sends a trainer's weights to engines on any machine; a context manager of the trainer's process.

    Example::

        with SharedWeights() as shared, BroadcastWeights("10.0.0.1") as broadcast, Session(config) as session:
            ...
            with shared.offer(model.named_parameters()) as held, broadcast.offer(held) as source:
                session.update_weights(source)
    """

    def __init__(self, host: str = "127.0.0.1", backend: str = "gloo", piece_bytes: int = 1 << 28) -> None:
        """Listen for readers.

        Args:
            host: the address by which engines reach this machine.
            backend: ``gloo``, or ``nccl`` where the trainer and each process of an engine have a GPU of their
                own.
            piece_bytes: about the most that is under way at a time; a larger tensor goes alone.

        Raises:
            ConfigError: this torch lacks the backend.
        """
        if backend not in ("gloo", "nccl") or not distributed.is_backend_available(backend):
            raise ConfigError(f"this torch has no backend {backend!r} to send weights by; take gloo")
        self._host, self._backend, self._piece_bytes = host, backend, piece_bytes
        self._store = distributed.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self._senders: list[_Sender] = []
        self._numbers = itertools.count()

    def __enter__(self) -> BroadcastWeights:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @contextmanager
    def offer(self, held: WeightSpec) -> Iterator[WeightSpec]:
        """Yield what names weights for ``update_weights``, which are ``held`` by ``SharedWeights``.

        The previous ones are sent until the end of the ``with`` block, and these from then on, to instances
        that start later.  After an error of Seer it is the previous ones that go on.  After any other error,
        such as Ctrl-C, both do until the next update.

        Raises:
            EngineError: the memory is not there any more.
        """
        settings = {
            **held.settings,
            "host": self._host,
            "port": self._store.port,
            "offer": next(self._numbers),
            "backend": self._backend,
            "piece_bytes": self._piece_bytes,
        }
        with replacing(self._senders, _Sender(settings), _Sender.close):
            yield WeightSpec(BROADCAST, settings)

    def close(self) -> None:
        """Send no more, once a pass that has begun is over."""
        while self._senders:
            self._senders.pop().close()


class _Sender:
    """Sends weights in passes, in a thread of its own, until it is closed."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._settings = settings
        self._memory = SharedMemory(settings)
        self._store = _store(settings, "localhost")
        self._device = _device(settings)  # of the trainer's thread, for each has its own
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._serve, name="seer-broadcast", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._closed.set()
        self._thread.join()

    def _serve(self) -> None:
        served = 0
        while not self._closed.wait(GATHER_S):
            if self._store.add(READERS, 0) > served:
                time.sleep(GATHER_S)
                asked = self._store.add(READERS, 0)
                self._send(range(served, asked))
                served = asked

    def _send(self, readers: Sequence[int]) -> None:
        """Broadcast everything once; a pass that breaks is an error of its readers'."""
        size = len(readers) + 1
        try:
            for rank, reader in enumerate(readers, 1):
                self._store.set(f"pass-{reader}", json.dumps([readers[0], rank, size]))
            group = _Group(self._store, self._device, readers[0], 0, size)
            for piece in _pieces(self._settings):
                group.broadcast(self._memory.bytes_between(piece[0].begin, piece[-1].end).to(self._device))
            group.wait_for_all()
        except RuntimeError as error:  # of which torch's errors are subclasses
            log.warning("weights_not_broadcast", readers=len(readers), error=_fact(error))


class Broadcast:
    """Weights that a trainer sends when they are asked for, piece by piece; a ``WeightSource``."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        """Connect to the trainer.

        Raises:
            EngineError: it cannot be reached.
        """
        self._settings = settings
        try:
            self._store = _store(settings, settings["host"])
        except RuntimeError as error:
            raise EngineError(
                f"the trainer that sends the weights cannot be reached: {_fact(error)}; it must be alive, and"
                f" {settings['host']!r} its address"
            ) from error

    def tensors(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield tensor after tensor of a pass of its own; those of a piece share memory, which is new.

        Raises:
            EngineError: the trainer or another reader was lost, or what came is not what was sent.
        """
        checksums: dict[str, tuple[Sequence[int], str]] = {}
        try:
            device = _device(self._settings)
            own = self._store.add(READERS, 1) - 1
            group = _Group(self._store, device, *json.loads(self._store.get(f"pass-{own}")))
            for piece in _pieces(self._settings):
                first = piece[0].begin
                values = torch.empty(piece[-1].end - first, dtype=torch.uint8, device=device)
                group.broadcast(values)
                for name, dtype, shape, begin, end in piece:
                    part = values[begin - first : end - first]
                    if device.type == "cpu":
                        checksums[name] = shape, checksum_of(part.numpy())
                    yield name, part.view(getattr(torch, dtype)).view(shape)
            group.wait_for_all()
        except RuntimeError as error:
            raise EngineError(
                f"the weights did not arrive: {_fact(error)}; the trainer, or another reader, was lost;"
                " update again"
            ) from error
        digest = self._settings["digest"]
        if checksums and (found := digest_of_checksums(checksums)) != digest:
            raise EngineError(f"the weights that arrived have the digest {found}, not {digest}; update again")


class _Group:
    """A process group of torch for one pass, beside the one that an engine has for itself."""

    def __init__(self, store: Any, device: torch.device, number: int, rank: int, size: int) -> None:
        own = distributed.PrefixStore(f"group-{number}", store)
        limit = timedelta(seconds=LIMIT_S)
        if device.type == "cuda":
            options = distributed.ProcessGroupNCCL.Options()
            options._timeout = limit
            self._group = distributed.ProcessGroupNCCL(own, rank, size, options)
        else:
            self._group = distributed.ProcessGroupGloo(own, rank, size, limit)

    def broadcast(self, values: torch.Tensor) -> None:
        """Send the trainer's bytes into these of all others."""
        if len(values):
            self._group.broadcast(values, 0).wait()

    def wait_for_all(self) -> None:
        """Wait until all have come this far, so that none closes a connection that still holds values."""
        self._group.barrier().wait()


def _device(settings: Mapping[str, Any]) -> torch.device:
    """Return where this process has what is sent."""
    if settings["backend"] == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _fact(error: RuntimeError) -> str:
    """Return the first line of an error of torch's, which C++ frames may follow."""
    return str(error).partition("\n")[0]


def _store(settings: Mapping[str, Any], host: str) -> Any:
    """Connect to where readers ask for passes over the weights of an offer."""
    store = distributed.TCPStore(
        host, settings["port"], timeout=timedelta(seconds=CONNECT_S), wait_for_workers=False
    )
    store.set_timeout(timedelta(seconds=LIMIT_S))
    return distributed.PrefixStore(f"offer-{settings['offer']}-{settings['digest']}", store)


def _pieces(settings: Mapping[str, Any]) -> Iterator[list[TensorSlice]]:
    """Yield the tensors in pieces, which follow one another in memory."""
    piece: list[TensorSlice] = []
    for row in settings["table"]:
        tensor = TensorSlice(*row)
        if piece and tensor.end - piece[0].begin > settings["piece_bytes"]:
            yield piece
            piece = []
        piece.append(tensor)
    if piece:
        yield piece
