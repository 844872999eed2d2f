"""What a trainer tells the engines over HTTP: new weights, to sleep, to wake; and how they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta, Struct
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from seer_core.errors import EngineError, OutputError, PromptError
from seer_core.runtime import Runtime
from seer_core.weights import WeightSpec, directory
from seer_server.areas import Area, Place, adopt, receive
from seer_server.desk import AsleepError, Desk
from seer_server.http import Refused, check_token, departure, read_body
from seer_server.streams import decode, refusing

__all__ = ["Control"]

WaitS = Annotated[float, Meta(ge=0, le=3600)]
"""Seconds to wait for what is unfinished."""

LEAVE_S = 5.0
"""Unless it is said: enough to notice that a client has left what it asked for."""


class SharedArea(Struct, frozen=True, forbid_unknown_fields=True):
    """Sealed memory of a process on this machine, which ends with its digest."""

    area: str
    table: list[Place]
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]


class WeightsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/weights``: a directory of safetensors, or shared memory."""

    directory: Annotated[str, Meta(min_length=1)] | None = None
    shared: SharedArea | None = None
    version: Annotated[int, Meta(ge=1)] | None = None
    wait_s: WaitS = LEAVE_S


class SentRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The query of ``PUT /v1/weights``, whose body is safetensors."""

    version: Annotated[int, Meta(ge=1)] | None = None
    wait_s: WaitS = LEAVE_S


class SleepRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/sleep``."""

    wait_s: WaitS = LEAVE_S


@attrs.define(eq=False)
class Control:
    """Routes for whoever trains; it holds the memory of the current weights, if they came by such."""

    desk: Desk
    token: str | None
    _area: Area | None = None

    async def update_weights(self, request: Request) -> Response:
        """Load a directory or shared memory."""
        check_token(request, self.token)
        body = await read_body(request)
        with refusing(self.desk):
            asked = decode(body, WeightsRequest)
            if (asked.directory is None) == (asked.shared is None):
                raise PromptError("give either directory or shared")
            if asked.directory is not None:
                source = directory(asked.directory)
                return await self._update(request, source, None, asked.version, asked.wait_s)
            assert asked.shared is not None
            area = adopt(asked.shared.area, asked.shared.table, asked.shared.digest)
            return await self._update(request, area.source, area, asked.version, asked.wait_s)

    async def take_weights(self, request: Request) -> Response:
        """Load what is sent; it may come in while requests are unfinished."""
        check_token(request, self.token)
        with refusing(self.desk):
            try:
                asked = _query(request)
                area = await receive(request.stream())
            except OutputError as error:
                raise Refused(413, str(error)) from error
            except ClientDisconnect:
                raise Refused(499, "the weights were not sent to their end") from None  # nobody reads it
            return await self._update(request, area.source, area, asked.version, asked.wait_s)

    async def _update(
        self, request: Request, source: WeightSpec, area: Area | None, version: int | None, wait_s: float
    ) -> Response:
        fleet = self.desk.runtime.fleet
        try:
            self._expect_awake()
            async with self._idle(request, wait_s) as runtime:
                instances = set(runtime.living)
                try:
                    loaded = await runtime.update_weights(source, version)
                except EngineError as error:
                    if instances and instances <= set(runtime.living):  # they refuse, and none has failed
                        raise Refused(400, str(error)) from error
                    raise
        finally:
            # Instances that start later read what is current, whatever failed after that.
            old = area
            if fleet.weights.current.source is source:
                old, self._area = self._area, area
            if old is not None:
                old.close()
        return JSONResponse({"weight_version": loaded})

    @asynccontextmanager
    async def _idle(self, request: Request, wait_s: float) -> AsyncIterator[Runtime]:
        """Lend the runtime as the desk does, but to nobody who has gone while waiting for it."""
        lent = self.desk.idle(wait_s)
        entered = asyncio.ensure_future(lent.__aenter__())
        gone = asyncio.ensure_future(departure(request))
        try:
            await asyncio.wait({entered, gone}, return_when=asyncio.FIRST_COMPLETED)
            if not entered.done():
                raise Refused(499, "the client has gone")  # nobody reads it
        except BaseException:
            entered.cancel()
            await asyncio.wait({entered})
            if not entered.cancelled() and entered.exception() is None:  # it came too late to be cancelled
                await lent.__aexit__(None, None, None)
            raise
        finally:
            gone.cancel()
        async with AsyncExitStack() as stack:
            runtime = entered.result()
            stack.push_async_exit(lent)
            yield runtime

    def _expect_awake(self) -> None:
        if self.desk.runtime.fleet.asleep:
            raise AsleepError("the instances are asleep; wake them first: POST /v1/wake")

    async def sleep(self, request: Request) -> Response:
        """Let the instances give their memory back."""
        check_token(request, self.token)
        body = await read_body(request)
        with refusing(self.desk):
            asked = decode(body, SleepRequest)
            async with self._idle(request, asked.wait_s) as runtime:
                freed = await runtime.sleep()
        return JSONResponse({"freed_bytes": freed})

    async def wake(self, request: Request) -> Response:
        """Let the instances take their memory again."""
        check_token(request, self.token)
        await read_body(request)
        with refusing(self.desk):
            if self.desk.runtime.fleet.asleep:
                async with self.desk.idle() as runtime:
                    await runtime.wake()
        return JSONResponse({})

    async def state(self, request: Request) -> Response:
        """Say what is loaded, and what is unfinished."""
        check_token(request, self.token)
        desk, runtime = self.desk, self.desk.runtime
        with refusing(desk):
            desk.expect_working()
        found: dict[str, Any] = {
            "weight_version": runtime.weight_version,
            "asleep": runtime.fleet.asleep,
            "changing": desk.changing,
            "unfinished": desk.unfinished,
            "announced": desk.announced,
            "instances": list(runtime.living),
            "max_model_len": runtime.fleet.model.max_model_tokens,
            "vocab_size": runtime.fleet.model.vocab_size,
        }
        return JSONResponse(found)


def _query(request: Request) -> SentRequest:
    try:
        return msgspec.convert(dict(request.query_params), SentRequest, strict=False)
    except msgspec.ValidationError as error:
        raise PromptError(f"the query does not fit: {error}") from None
