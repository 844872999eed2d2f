"""Calls that every rank answers, and the process of any but the first.

It is a fork of rank 0, or started as ``python -m seer_sglang.rank NUMBER FD``, with a connection to rank 0.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Mapping
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import attrs
import structlog
from seer_worker.process.adapter import Rejected
from seer_worker.process.child import configure_log
from seer_worker.weights import checkpoint, memory
from seer_worker.weights.adapters import Merged

from seer_core.ports.weights import WeightSource, WeightSpec
from seer_sglang import internals
from seer_sglang.ranks import Flaw, FollowingRank

if TYPE_CHECKING:
    import torch

    from seer_sglang.engine import SglangEngine

__all__ = ["RankStart", "SglangRank", "answer"]

log = structlog.get_logger("seer")


@attrs.frozen
class RankStart:
    """The first message to another rank: its engine's arguments, and a port at which the ranks meet."""

    settings: Mapping[str, Any]
    kv_cache_bytes: int | None
    count: int
    port: int
    uniform_drafts: bool
    end_token_ids: tuple[int, ...]


class SglangRank:
    """A rank's weights and memory."""

    def __init__(self, engine: SglangEngine) -> None:
        self._engine = engine
        self._weights: WeightSource | None = None

    def check(
        self,
        spec: WeightSpec,
        wanted: Mapping[str, checkpoint.TensorHeader],
        dtype: torch.dtype,
        base: WeightSpec,
    ) -> str | None:
        """Open a source of weights and check its tensors; return why they are refused, if they are."""
        self._weights = None
        try:
            self._weights = checkpoint.open_checked(
                spec, wanted, checkpoint.ties(self._engine.runner.model), dtype, base
            )
        except Rejected as rejection:
            return str(rejection)
        return None

    def load(self, version: int) -> str:
        """Load the weights that were checked; return their fingerprint."""
        from seer_sglang import weights

        source, self._weights = self._weights, None
        assert source is not None
        found = weights.load(self._engine.runner, source, version)
        return source.joined(found) if isinstance(source, Merged) else found

    def fingerprint(self) -> str:
        """Return what stands for the weights."""
        from seer_sglang import weights

        return weights.fingerprint(self._engine.runner.model, 0)

    def used_bytes(self) -> int:
        """Return the memory in use: the process's, or all of the device."""
        import torch

        return memory.used_bytes(torch.device(self._engine.runner.device))

    def release(self) -> None:
        """Give KV memory back; on a GPU that of weights too, if they have a copy."""
        from seer_sglang import sleeping

        sleeping.release(self._engine.scheduler, self._engine.kv_layers)

    def restore(self) -> None:
        """Take the memory again."""
        from seer_sglang import sleeping

        sleeping.resume(self._engine.scheduler, self._engine.kv_layers)


def answer(rank: SglangRank, method: str, arguments: tuple[Any, ...]) -> Any:
    """Return what a method of ``SglangRank`` returns, or why it failed."""
    try:
        return getattr(rank, method)(*arguments)
    except Exception as error:
        log.exception("rank_failed", method=method)
        return Flaw(f"failed: {type(error).__name__}: {error}")


def _make_engine(start: RankStart, ranks: FollowingRank) -> SglangEngine:
    internals.check_kernels()

    from seer_sglang import cache
    from seer_sglang.engine import SglangEngine, server_args

    if start.settings.get("radix_cache_backend") == cache.BACKEND:
        cache.register()
    args = server_args(start.settings, start.kv_cache_bytes)
    return SglangEngine(
        args, None, ranks, start.port, uniform_drafts=start.uniform_drafts, end_token_ids=start.end_token_ids
    )


def main(number: int, fd: int) -> None:
    """Do what rank 0 asks for, until it ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    configure_log()
    connection = Connection(fd)
    start: RankStart = connection.recv()
    ranks = FollowingRank(number, start.count, connection)
    engine = _make_engine(start, ranks)
    rank = SglangRank(engine)
    while True:
        match ranks.receive():
            case (str(method), tuple(arguments)):
                ranks.answer(answer(rank, method, arguments))
            case (str(method), tuple(arguments), dict(named)):
                getattr(engine, method)(*arguments, **named)


if __name__ == "__main__":
    with suppress(EOFError):  # rank 0 is gone; the kernel ends its children
        main(int(sys.argv[1]), int(sys.argv[2]))
