"""Control calls of the servers that engines are: passed on to all of them, one call at a time.

A call that pauses servers, puts them to sleep or changes their weights holds the rollout: chunks under way
are ended, and Seer sends no more until the call that ends it.  So no response has tokens of two versions.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from enum import Enum
from itertools import count
from typing import Any, NamedTuple, Protocol, runtime_checkable
from urllib.parse import parse_qs

import attrs
import msgspec
import structlog
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from seer_core.errors import EngineError
from seer_server.broker import BusyError, RolloutBroker
from seer_server.http import Refused, pieces, unless_disconnected
from seer_server.shadow_recorder import ShadowRecorder

__all__ = ["ABORTS", "CONTROL_CALLS", "ControlCalls", "ControlRoute", "ControlledServer"]

log = structlog.get_logger("seer")

JSON = "application/json"

LARGEST_CALL = 1 << 30
"""Bytes of a control call: weights themselves belong into a file, or go from GPU to GPU."""

LOOK_S = 10.0
"""How long a server may take to say which calls it has."""

LEAVE_S = 5.0
"""How long a call that changes weights waits for unfinished responses."""

WAIT_S = 24 * 3600.0
"""How long a pause waits that is to wait for responses."""

OK, MISSING = 200, 404

NOT_ALIKE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError, LookupError, TypeError)
"""Raised where answers of several servers cannot become one."""


@runtime_checkable
class ControlledServer(Protocol):
    """The further methods of an ``InstanceClient`` over a server that takes calls of its owner's."""

    id: str
    address: str
    """Where the server is."""

    @property
    def kind(self) -> str:
        """The kind of the server: ``vllm`` or ``sglang``."""
        ...

    @property
    def served_model(self) -> str:
        """The name by which it serves the model; empty until it has been asked."""
        ...

    async def close_calls(self) -> None:
        """End the connections of calls."""
        ...

    def opened(
        self, method: str, path: str, body: bytes | None, kind: str = JSON
    ) -> AbstractAsyncContextManager[tuple[int, str, AsyncIterator[bytes]]]:
        """As ``call``, but yield the body of the answer in pieces, as they come."""
        ...

    async def call(
        self, method: str, path: str, body: bytes | None, kind: str = JSON, limit_s: float | None = None
    ) -> tuple[int, str, bytes]:
        """Pass a call on unread; return status, kind and body of the answer.

        Raises:
            EngineError: the server does not answer.
        """
        ...


class Effect(Enum):
    """The effect of a call on the responses that are under way."""

    NONE = "none on responses"
    ONE = "none on responses; one server answers, each in turn"
    CACHES = "chunks under way end"
    PAUSE = "chunks under way end, and none is sent"
    RESUME = "chunks are sent again"
    SLEEP = "as a pause"
    WAKE = "as the end of a pause"
    BEGIN = "no request is taken until the end of the change"
    WEIGHTS = "no request is taken meanwhile"
    END = "requests are taken again"


class ControlCall(NamedTuple):
    """A call: its method, its effect, and how the answers of several servers become one."""

    method: str
    effect: Effect
    merge: Callable[[list[Any]], Any] = lambda answers: answers[0]


def _sum_of(name: str) -> Callable[[list[Any]], Any]:
    return lambda answers: {**answers[0], name: sum(each[name] for each in answers)}


def _any_of(name: str) -> Callable[[list[Any]], Any]:
    return lambda answers: {**answers[0], name: any(each[name] for each in answers)}


def _all_of(name: str) -> Callable[[list[Any]], Any]:
    return lambda answers: {**answers[0], name: all(each[name] for each in answers)}


def _joined(answers: list[Any]) -> Any:
    """Return the results of all workers, in the order of the servers."""
    return {"results": [result for each in answers for result in each["results"]]}


SKYRLS_ADAPTERS, VLLMS_ADAPTERS = "/skyrl/v1/load_lora_adapter", "/v1/load_lora_adapter"

CONTROL_CALLS: dict[str, ControlCall] = {
    # vLLM's
    "/collective_rpc": ControlCall("POST", Effect.WEIGHTS, _joined),
    "/finish_weight_update": ControlCall("POST", Effect.END),
    "/get_world_size": ControlCall("GET", Effect.NONE, _sum_of("world_size")),
    "/init_weight_transfer_engine": ControlCall("POST", Effect.NONE),
    "/is_paused": ControlCall("GET", Effect.NONE, _any_of("is_paused")),
    "/is_sleeping": ControlCall("GET", Effect.NONE, _any_of("is_sleeping")),
    "/pause": ControlCall("POST", Effect.PAUSE),
    "/reset_encoder_cache": ControlCall("POST", Effect.CACHES),
    "/reset_mm_cache": ControlCall("POST", Effect.CACHES),
    "/reset_prefix_cache": ControlCall("POST", Effect.CACHES, _all_of("success")),
    "/resume": ControlCall("POST", Effect.RESUME),
    "/shutdown_weight_transfer_engine": ControlCall("POST", Effect.NONE),
    "/sleep": ControlCall("POST", Effect.SLEEP),
    "/start_weight_update": ControlCall("POST", Effect.BEGIN),
    "/update_weights": ControlCall("POST", Effect.WEIGHTS),
    "/v1/chat/completions/derender": ControlCall("POST", Effect.ONE),
    "/v1/chat/completions/render": ControlCall("POST", Effect.ONE),
    "/v1/completions/derender": ControlCall("POST", Effect.ONE),
    "/v1/completions/render": ControlCall("POST", Effect.ONE),
    VLLMS_ADAPTERS: ControlCall("POST", Effect.NONE),
    "/v1/unload_lora_adapter": ControlCall("POST", Effect.NONE),
    "/wake_up": ControlCall("POST", Effect.WAKE),
    "/weight_info": ControlCall("GET", Effect.NONE),
    # of SkyRL's servers
    "/fetch_weights": ControlCall("POST", Effect.NONE),  # loaded later, by /update_weights
    SKYRLS_ADAPTERS: ControlCall("POST", Effect.NONE),
    # SGLang's
    "/begin_weight_update": ControlCall("POST", Effect.BEGIN),
    "/continue_generation": ControlCall("POST", Effect.RESUME),
    "/destroy_weights_update_group": ControlCall("POST", Effect.NONE),
    "/end_weight_update": ControlCall("POST", Effect.END),
    "/flush_cache": ControlCall("POST", Effect.CACHES),
    "/get_model_info": ControlCall("GET", Effect.NONE),
    "/get_server_info": ControlCall("GET", Effect.NONE),
    "/get_weights_by_name": ControlCall("POST", Effect.NONE),
    "/init_weights_update_group": ControlCall("POST", Effect.NONE, _all_of("success")),
    "/load_lora_adapter": ControlCall("POST", Effect.NONE, _all_of("success")),
    "/model_info": ControlCall("GET", Effect.NONE),
    "/pause_generation": ControlCall("POST", Effect.PAUSE),
    "/release_memory_occupation": ControlCall("POST", Effect.SLEEP),
    "/resume_memory_occupation": ControlCall("POST", Effect.WAKE),
    "/unload_lora_adapter": ControlCall("POST", Effect.NONE, _all_of("success")),
    "/update_weights_from_disk": ControlCall("POST", Effect.WEIGHTS, _all_of("success")),
    "/update_weights_from_distributed": ControlCall("POST", Effect.WEIGHTS, _all_of("success")),
    "/update_weights_from_ipc": ControlCall("POST", Effect.WEIGHTS, _all_of("success")),
    "/update_weights_from_tensor": ControlCall("POST", Effect.WEIGHTS, _all_of("success")),
    "/weights_checker": ControlCall("POST", Effect.NONE),
    # of both
    "/server_info": ControlCall("GET", Effect.NONE),
    "/start_profile": ControlCall("POST", Effect.NONE),
    "/stop_profile": ControlCall("POST", Effect.NONE),
    "/update_weight_version": ControlCall("POST", Effect.WEIGHTS, _all_of("success")),
}
"""The calls that are passed on, by path."""


ABORTS = ("/abort_requests", "/inference/v1/abort_requests", "/abort_request")
"""The calls that end requests, which any of the servers may have."""


class ControlRoute(Route):
    """A route whose call is passed on."""


PARTS = frozenset({"weights", "kv_cache"})
"""The parts of a server's memory that sleep and wake by themselves."""

SCHEDULING = "scheduling"
"""The part that vLLM puts to sleep alone at level 0; any call that wakes memory wakes it too."""

SLEEP = "sleep: "

CHANGE = "weights"
PAUSED = "pause"


@attrs.define(eq=False)
class ControlCalls:
    """Routes of control calls; ``reasons`` say why no chunks are sent, as far as owners have asked for it."""

    broker: RolloutBroker
    off: bool = False
    """Whether Seer schedules nothing, so that there is nothing to hold."""
    recorder: ShadowRecorder | None = None
    """Notes the requests that are passed on, if it is there."""
    reasons: set[str] = attrs.Factory(set)
    _turn: asyncio.Lock = attrs.Factory(asyncio.Lock)
    _exclusive: AsyncExitStack | None = None
    _moving: bool = False
    """Whether it is being taken, once no response is unfinished, or given back."""
    _slept_before: bool = False
    _kept: bool = False
    """Whether the rollout is paused with its responses."""
    _briefly: bool = False
    """Whether it is paused for this call."""
    _changed: bool = False
    _next: Iterator[int] = attrs.Factory(count)
    _free: asyncio.Event = attrs.Factory(asyncio.Event)

    @property
    def servers(self) -> list[ControlledServer]:
        """The servers, in the order of the config."""
        return [each for each in self.broker.runtime.engines.values() if isinstance(each, ControlledServer)]

    @property
    def served_model(self) -> str:
        """The name by which servers serve the model; empty where there are none."""
        return next((each.served_model for each in self.servers if each.served_model), "")

    def seeds(self, seed: int, n: int, form: str = "") -> list[int] | None:
        """Return the seeds that a server alone would give ``n`` responses; None where engines are Seer's.

        The server is one of the kind that a request's ``form`` is of; without one, as these are.
        """
        servers = self.servers
        if not servers:
            return None
        kind = form or servers[0].kind
        return [seed + index for index in range(n)] if kind == "vllm" else [seed] * n

    def attaches(self, kind: str) -> bool:
        """Return whether fields that Seer does not have can go to servers of a kind unread."""
        servers = self.servers if self.broker.runtime.model.divided_attachments is not None else []
        return bool(servers) and all(each.kind == kind for each in servers)

    async def serves(self, name: str) -> bool:
        """Return whether the first server that answers lists a model or an adapter of this name."""
        for server in self.servers:
            with suppress(EngineError, *NOT_ALIKE):
                _, _, body = await server.call("GET", "/v1/models", None, limit_s=LOOK_S)
                return name in [each["id"] for each in msgspec.json.decode(body)["data"]]
        return False

    @property
    def held(self) -> bool:
        """Whether requests wait until owners let them be taken."""
        return self._exclusive is not None or self._moving

    async def close(self) -> None:
        """End the connections to servers that were never started as engines."""
        await asyncio.gather(*(each.close_calls() for each in self.servers))

    async def free(self) -> None:
        """Wait until owners let requests be taken."""
        while self.held:
            self._free.clear()
            await self._free.wait()

    async def handle(self, request: Request) -> Response:
        """Pass a control call on to the servers, in the order in which calls come."""
        path = request.url.path
        call = CONTROL_CALLS[path]
        if not self.servers:
            raise Refused(404, f"the engines are Seer's own, and have no {path}; see /v1/state and /v1/sleep")
        if call.effect is Effect.ONE:
            return await self.pass_on(request)
        body = await _read(request)
        query, fields = request.url.query, _fields(body)
        async with self._turn:
            servers = await self._having(call.method, path)
            effect = await self._effect(path, fields)
            if self.recorder is not None and effect is not Effect.NONE:
                self.recorder.changed()
            if not self.off:
                before = self._before(effect, path, parse_qs(query), fields)
                await unless_disconnected(request, before)
            done = awake = False
            try:
                kind = request.headers.get("content-type", JSON)
                answers = await self._pass_on(servers, call.method, path, query, body, kind)
                answer, done = _one_answer(call, servers, answers)
                if done and effect is Effect.WAKE:
                    awake = all(_fields(each).get("status") == "awake" for _, _, each in answers)
            finally:
                if not self.off:
                    await self._after(effect, parse_qs(query, keep_blank_values=True), fields, done, awake)
            return answer

    async def _effect(self, path: str, fields: Mapping[str, Any]) -> Effect:
        """Return the effect of a call: an adapter in place of another of its name is a change of weights."""
        in_place = path == SKYRLS_ADAPTERS or (path == VLLMS_ADAPTERS and fields.get("load_inplace"))
        if in_place and await self.serves(str(fields.get("lora_name"))):
            return Effect.WEIGHTS
        return CONTROL_CALLS[path].effect

    async def pass_on(self, request: Request) -> Response:
        """Pass a request on to the next server, and its answer back, both untouched."""
        body = await _read(request)
        servers = self.servers
        query = request.url.query
        place = f"{request.url.path}?{query}" if query else request.url.path
        kind = request.headers.get("content-type", JSON)
        failure: EngineError | None = None
        for _ in servers:
            server = servers[next(self._next) % len(servers)]
            stack = AsyncExitStack()
            try:
                answer = server.opened(request.method, place, body or None, kind)
                status, kind, found = await stack.enter_async_context(answer)
            except EngineError as error:
                failure = error
                continue
            if self.recorder is not None and status == OK:
                found = self.recorder.pieces(body, server.address, found)
            return _Passed(found, stack, status, kind)
        raise Refused(503, f"no server answers: {failure}")

    async def pass_to_all(self, request: Request) -> Response:
        """Pass a request on to all servers, untouched; return the answer of one that takes it."""
        body = await _read(request)
        kind = request.headers.get("content-type", JSON)
        calls = [each.call(request.method, request.url.path, body, kind) for each in self.servers]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        found = [each for each in answers if not isinstance(each, BaseException)]
        for answer in answers:
            if isinstance(answer, BaseException) and not (found and isinstance(answer, EngineError)):
                raise answer
        status, kind, body = min(found, key=lambda each: each[0])
        return Response(body, status, media_type=kind)

    # The servers.

    async def _having(self, method: str, path: str) -> list[ControlledServer]:
        """Return the servers that answer.

        Raises:
            Refused: one of them lacks the call, or none answers.
        """
        servers = self.servers
        looks = [each.call("OPTIONS", path, None, limit_s=LOOK_S) for each in servers]
        answers = await asyncio.gather(*looks, return_exceptions=True)
        found: list[ControlledServer] = []
        failure: BaseException | None = None
        for server, answer in zip(servers, answers, strict=True):
            if isinstance(answer, BaseException):
                if not isinstance(answer, EngineError):
                    raise answer
                failure = answer
                log.warning("server_left_out", call=path, instance=server.id, error=str(answer))
            elif answer[0] == MISSING:
                raise Refused(
                    404,
                    f"the server at {server.address} has no {path}, so none of {len(servers)} was called;"
                    " vLLM has its control calls with VLLM_SERVER_DEV_MODE=1 in its environment",
                )
            else:
                found.append(server)
        if not found:
            raise Refused(503, f"no server takes {path}: {failure}")
        return found

    async def _pass_on(
        self,
        servers: Sequence[ControlledServer],
        method: str,
        path: str,
        query: str,
        body: bytes,
        kind: str,
    ) -> list[tuple[int, str, bytes]]:
        """Call all at once: some calls wait for each other, as those that form a group for weights."""
        bodies = await _with_ranks(servers, path, body)
        place = f"{path}?{query}" if query else path
        calls = [
            server.call(method, place, own if method == "POST" else None, kind)
            for server, own in zip(servers, bodies, strict=True)
        ]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, EngineError):
                raise Refused(502, f"{path} was passed on, and not answered by all: {answer}")
            if isinstance(answer, BaseException):
                raise answer
        return [answer for answer in answers if not isinstance(answer, BaseException)]

    # The rollout.

    async def _before(
        self, effect: Effect, path: str, query: dict[str, list[str]], fields: dict[str, Any]
    ) -> None:
        """Let no chunk run that the call would disturb."""
        if effect is not Effect.NONE:
            await self.broker.recover()
        match effect:
            case Effect.PAUSE | Effect.SLEEP:
                named = fields.get("mode") or (query.get("mode") or [""])[0]
                await self._stop(named or ("wait" if path == "/release_memory_occupation" else "abort"))
            case Effect.BEGIN | Effect.WEIGHTS:
                if self._kept:
                    raise BusyError(
                        f"{self.broker.unfinished} responses are kept by the pause, and no response may have"
                        " tokens of two versions; resume, and pause with mode=abort or mode=wait before"
                        " weights change"
                    )
                await self._hold(LEAVE_S)
            case Effect.CACHES:
                if self._exclusive is None and not self._kept and not self.broker.runtime.asleep:
                    await self._quiet()
                    self._briefly = True

    async def _stop(self, mode: str) -> None:
        if self._exclusive is not None:
            return
        if self._kept:
            if mode == "abort":
                self.broker.abort_all()
            return
        if mode == "wait":
            await self._hold(WAIT_S)
            return
        await self._quiet()
        if mode == "abort" or not self.broker.unfinished:
            try:
                self.broker.abort_all()
            finally:
                self._loud()
            await self._hold(LEAVE_S)
        else:
            self._kept = True

    async def _quiet(self) -> None:
        """End the chunks under way, and send no more."""
        try:
            await self.broker.require_rollout().pause(by="a control call")
        except BaseException:
            self._loud()
            raise

    def _loud(self) -> None:
        self.broker.require_rollout().resume(by="a control call")

    async def _hold(self, wait_s: float) -> None:
        """Take the runtime for the owners, once no response is unfinished."""
        if self._exclusive is not None:
            return
        self._moving = True
        try:
            async with AsyncExitStack() as stack:
                runtime = await stack.enter_async_context(self.broker.exclusive(wait_s))
                self._slept_before = runtime.asleep
                await runtime.sleep()
                self._exclusive = stack.pop_all()
        finally:
            self._moving = False
            self._free.set()

    async def _after(
        self,
        effect: Effect,
        query: dict[str, list[str]],
        fields: dict[str, Any],
        done: bool,
        awake: bool,
    ) -> None:
        """Note what holds the rollout now; let it go on where nothing does."""
        tags = fields.get("tags") or query.get("tags")
        asleep = {SCHEDULING} if query.get("level") == ["0"] else PARTS
        match effect, done:
            case Effect.PAUSE, True:
                self.reasons.add(PAUSED)
            case Effect.RESUME, True:
                self.reasons.discard(PAUSED)
            case Effect.SLEEP, True:
                self.reasons |= {SLEEP + each for each in tags or asleep}
            case Effect.WAKE, True:
                if tags:
                    self.reasons -= {SLEEP + each for each in (*tags, SCHEDULING)}
                else:
                    self.reasons &= {PAUSED, CHANGE}
                if awake:  # vLLM ends its pause when it has all its parts again
                    self.reasons.discard(PAUSED)
            case Effect.BEGIN, True:
                self.reasons.add(CHANGE)
            case Effect.END, True:
                self.reasons.discard(CHANGE)
        self._changed |= effect in (Effect.BEGIN, Effect.WEIGHTS, Effect.END)
        if self._briefly:
            self._briefly = False
            self._loud()
        if not self.reasons:
            await self._release()

    async def _release(self) -> None:
        if self._kept:
            self._kept = False
            self._loud()
        if self._exclusive is None:
            return
        changed, self._changed = self._changed, False
        stack, self._exclusive = self._exclusive, None
        self._moving = True
        try:
            async with stack:
                runtime = self.broker.runtime
                if not self._slept_before:
                    await runtime.wake()
                    if changed:
                        version = await runtime.weights_changed()
                        log.info("weights_changed_by_owner", version=version)
        finally:
            self._moving = False
            self._free.set()


class _Passed(StreamingResponse):
    """An answer of a server's in pieces; its connection ends with the client's."""

    def __init__(
        self, pieces: AsyncIterator[bytes], connection: AsyncExitStack, status: int, kind: str
    ) -> None:
        super().__init__(pieces, status, {"Content-Type": kind})
        self._connection = connection

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the pieces."""
        async with self._connection:
            await super().__call__(scope, receive, send)


async def _read(request: Request) -> bytes:
    body = bytearray()
    try:
        async for piece in pieces(request):
            body += piece
            if len(body) > LARGEST_CALL:
                raise Refused(
                    413, f"a control call may have {LARGEST_CALL:,} bytes; make it to the servers themselves"
                )
    except ClientDisconnect:
        raise Refused(499, "the call was not sent to its end") from None
    return bytes(body)


def _fields(body: bytes) -> dict[str, Any]:
    """Return the fields of a body; it need not have any."""
    try:
        found = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


async def _with_ranks(servers: Sequence[ControlledServer], path: str, body: bytes) -> list[bytes]:
    """Return a body for each server: its ranks in a group for weights stand behind those before it."""
    same = [body] * len(servers)
    if path not in ("/init_weight_transfer_engine", "/init_weights_update_group") or len(servers) < 2:
        return same
    fields = _fields(body)
    where = fields.get("init_info") if path == "/init_weight_transfer_engine" else fields
    if not isinstance(where, dict) or type(where.get("rank_offset")) is not int:
        return same
    bodies: list[bytes] = []
    for size in await asyncio.gather(*(_ranks(each, path) for each in servers)):
        bodies.append(msgspec.json.encode(fields))
        where["rank_offset"] += size
    return bodies


async def _ranks(server: ControlledServer, path: str) -> int:
    """Return how many workers a server has."""
    vllm = path == "/init_weight_transfer_engine"
    status, _, body = await server.call("GET", "/get_world_size" if vllm else "/server_info", None)
    found = _fields(body)
    sizes = [found.get("world_size")] if vllm else [found.get("tp_size"), found.get("pp_size", 1)]
    if status != 200 or not all(type(each) is int and each > 0 for each in sizes):
        raise Refused(502, f"the server at {server.address} does not say how many workers it has")
    number = 1
    for each in sizes:
        number *= int(each or 1)
    return number


def _one_answer(
    call: ControlCall, servers: Sequence[ControlledServer], answers: Sequence[tuple[int, str, bytes]]
) -> tuple[Response, bool]:
    """Return the answer that stands for those of all servers, and whether none is an error's."""
    for server, (status, kind, body) in zip(servers, answers, strict=True):
        if status >= 400:
            log.warning("control_call_failed", instance=server.id, status=status)
            return Response(body, status, {"X-Seer-Server": server.address}, kind), False
    status, kind, body = answers[0]
    if len(answers) > 1:
        with suppress(*NOT_ALIKE):  # or the first stands for all
            body = msgspec.json.encode(call.merge([msgspec.json.decode(each[2]) for each in answers]))
    return Response(body, status, media_type=kind), True
