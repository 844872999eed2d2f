"""Shared KV and drafts of a server that has Seer's package beside its engine, as one instance uses them.

The messages are those of ``seer_worker.served``.  They are sent in order, many in one request, and none is
waited for but the first.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from contextlib import suppress
from secrets import token_hex
from typing import Any
from urllib.parse import urlsplit

import msgspec
import structlog
from msgspec import structs
from seer_worker.seer_version import seer_version
from seer_worker.served import (
    CALL,
    INFO,
    AddText,
    Attach,
    Detach,
    ServedAnswer,
    ServedCall,
    ServedInfo,
    ShareAs,
)
from seer_worker.wire import Degraded, ForgetGroup, PoolMessage

from seer_core.errors import EngineError
from seer_core.model import InstanceInfo
from seer_core.model.events import InstanceDegraded
from seer_core.ports.contracts import implemented
from seer_core.ports.drafting import Drafter, SiblingTokens
from seer_core.ports.engine import InstanceSink
from seer_core.ports.kv import LOOPBACK, KVPool, StoreSpec
from seer_remote.connection import Connection, Malformed, RefusedCall, Unreachable
from seer_remote.dialect import read

__all__ = ["SeerServer"]

log = structlog.get_logger("seer")

ATTACH_S = 600.0
"""A server that attaches makes a store and times its model, however long that is."""
LEAVE_S = 5.0
MOST_LEFT = 3
"""A server that has left the run so often is not attached again."""
ROUTES = "`pip install seer-vllm` beside vLLM and start it with VLLM_PLUGINS=seer in its environment"


class SeerServer:
    """A server's own half of Seer, as far as the run wants it."""

    def __init__(
        self, instance_id: str, kind: str, connection: Connection, left: Callable[[str], None]
    ) -> None:
        self.pool: KVPool | None = None
        self.drafter: Drafter | None = None
        self.attached = False
        self.ends_early = False
        """Whether it ends chunks where KV runs short."""
        self.drafting: dict[str, float] = {}
        """Figures of its draft source."""
        self.drafting_s = 0.0
        self._id, self._kind, self._connection = instance_id, kind, connection
        self._left = left
        """Called with the reason once it is attached no more."""
        self._times_left = 0
        self._driver = token_hex(8)
        self._info: ServedInfo | None = None
        self._answer = ServedAnswer()
        self._spec: StoreSpec | None = None
        self._wired: KVPool | None = None
        self._queue: list[Any] = []
        self._sending = asyncio.Lock()
        self._sender: asyncio.Task[None] | None = None
        self._sink: InstanceSink | None = None

    @property
    def shares_text(self) -> bool:
        """Whether siblings' tokens are sent to it."""
        return self.drafter is not None and self.drafter.shares()

    def use(self, pool: KVPool | None) -> bool:
        """Share KV through this pool from the next ``attach`` on; return whether it will."""
        self.pool = pool
        return pool is not None

    async def attach(self, sink: InstanceSink) -> None:
        """Let the server share KV and draft, if the run has a pool or a drafter.

        One that has left this run for another is used without both.

        Raises:
            EngineError: it cannot, as it was started; the sentence names the flag.
        """
        self.attached, self._sink = False, sink
        wanted = self.pool is not None or self.drafter is not None
        info = self._info = await self._ask_info() if wanted else await self._find_info()
        self.ends_early = info is not None and info.seer == seer_version()
        if not wanted or info is None:
            return
        if self._times_left and (info.serves or self._times_left >= MOST_LEFT):
            log.warning("server_not_attached", instance=self._id, why="it has left this run before")
            return
        if info.seer != seer_version():
            raise EngineError(
                f"{self._at} has Seer {info.seer}, and this run Seer {seer_version()}: install the same there"
            )
        if self.pool is not None and info.kv is None:
            raise EngineError(f"{self._at} shares no KV: {info.kv_lack}; {self._drop_pool}")
        if self.drafter is not None and not info.draft_tokens:
            raise EngineError(
                f"{self._at} drafts as its owner has configured it: {info.drafts_lack}; or drop the drafter"
                " from [seer].plugins"
            )
        self._spec = None if self.pool is None else self.pool.store(self._id)
        source = None if self.drafter is None else self.drafter.source()
        self._driver = token_hex(8)
        self._queue.clear()
        host = urlsplit(self._connection.url).hostname or LOOPBACK
        self._answer = await self._send([Attach(self._id, host, self._spec, source)], ATTACH_S)
        if self._answer.rejection is not None:
            raise EngineError(f"{self._at} refuses: {self._answer.rejection}")
        self.attached = True
        if implemented(self.pool, "connect") is not None:
            assert self.pool is not None
            self._wired = self.pool
            self.pool.connect(self._id, self._note)
        log.info(
            "server_attached",
            instance=self._id,
            runner=info.runner,
            shares_kv=self.pool is not None,
            draft_tokens=info.draft_tokens if source is not None else 0,
        )

    async def share_as(self, weights: str) -> None:
        """Let it share KV with the servers that have weights of this name."""
        if self.attached and self.pool is not None:
            self._queue.append(ShareAs(weights))
            await self.flush()

    def push(self, text: SiblingTokens) -> None:
        """Send what a response has written on another instance."""
        if self.shares_text:
            self._put(AddText.of(text))

    def forget(self, group_id: str) -> None:
        """Let it drop a group that is over."""
        self._put(ForgetGroup(group_id))

    def describe(self, info: InstanceInfo) -> InstanceInfo:
        """Return the info with what the placer needs of shared KV."""
        kv = self._answer.kv
        if not self.attached or kv is None or self._info is None or self._spec is None:
            return info
        return structs.replace(
            info,
            kv_bytes_per_token=kv.token_bytes,
            fetch_s_per_token=kv.fetch_s_per_token,
            kv_kind=kv.kind,
            kv_reach="" if self._spec.spans_nodes else self._info.node,
            node=self._info.node,
        )

    async def flush(self) -> None:
        """Send what waits, and take in what the server has to report."""
        if not self.attached:
            return
        answer = self._answer = await self._send([])
        if answer.rejection is not None:
            self.attached = False
            self._times_left += 1
            reason = f"the server is attached no more: {answer.rejection}"
            what = "drafting" if self.pool is None else "kv_pool"
            self._degraded(Degraded(what, reason))
            self._left(reason)
        self.drafting, self.drafting_s = answer.drafting, answer.drafting_s
        for note in answer.notes:
            if isinstance(note, Degraded):
                self._degraded(note)
            elif self._wired is not None:
                self._wired.receive(self._id, note.note)

    async def detach(self) -> None:
        """Have the server close what it has of this run; one that does not answer does so by itself."""
        if self.attached:
            with suppress(Unreachable, RefusedCall, Malformed):
                await self._send([Detach()], LEAVE_S)

    def leave(self) -> list[asyncio.Task[None]]:
        """Send nothing more; return what still runs."""
        self.attached, self._sink, self._wired = False, None, None
        self._queue.clear()
        sender, self._sender = self._sender, None
        return [] if sender is None else [sender]

    @property
    def _at(self) -> str:
        return f"instance {self._id!r}: the server at {self._connection.url}"

    @property
    def _drop_pool(self) -> str:
        return 'or set [seer].kv_pool = "none"'

    async def _find_info(self) -> ServedInfo | None:
        """Return what it can do; None where it has nothing of Seer's."""
        if self._kind != "vllm":
            return None
        try:
            return read(ServedInfo, await self._connection.get(INFO), INFO)
        except (RefusedCall, Malformed):
            return None

    async def _ask_info(self) -> ServedInfo:
        if self._kind != "vllm":
            raise EngineError(
                f"{self._at} is no vLLM, and has neither drafts nor shared KV of Seer's: {self._drop_pool},"
                " and drop the drafter from [seer].plugins"
            )
        try:
            return read(ServedInfo, await self._connection.get(INFO), INFO)
        except RefusedCall as error:
            if error.status != 404:
                raise
            raise EngineError(
                f"{self._at} has no half of Seer, which [seer].kv_pool and drafters need: {ROUTES};"
                f" {self._drop_pool}, and drop the drafter from [seer].plugins"
            ) from error

    def _put(self, message: Any) -> None:
        if not self.attached:
            return
        self._queue.append(message)
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._drain())

    async def _drain(self) -> None:
        await asyncio.sleep(0)  # those of one turn of the loop together
        while self._queue and self.attached:
            try:
                await self.flush()
            except (
                Unreachable,
                RefusedCall,
                Malformed,
            ) as error:
                # Whether it lives, the instance's watch finds out.
                log.warning("server_not_reached", instance=self._id, error=str(error))
                return

    async def _send(self, more: list[Any], limit_s: float = 60.0) -> ServedAnswer:
        """Send what waits and ``more``, after all that was sent before.

        What gets no answer may have been obeyed: texts are not sent again, the ends of groups are.
        """
        async with self._sending:
            messages, self._queue = [*self._queue, *more], []
            call = msgspec.to_builtins(ServedCall(self._driver, messages))
            try:
                return read(ServedAnswer, await self._connection.post(CALL, call, limit_s), CALL)
            except (Unreachable, RefusedCall):
                self._queue[:0] = [each for each in messages if isinstance(each, ForgetGroup)]
                raise

    def _note(self, note: Mapping[str, int]) -> None:
        self._put(PoolMessage(dict(note)))

    def _degraded(self, flaw: Degraded) -> None:
        if self._sink is not None:
            self._sink.degraded(InstanceDegraded(self._id, flaw.what, flaw.reason))
