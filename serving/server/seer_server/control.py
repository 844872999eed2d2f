"""Routes for trainers: weights, sleep, the engines' state, and commands on the rollout."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Annotated

import attrs
import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace
from seer_cli.controls import COMMANDS, RunCommand, carry_out
from seer_host.shared_weights import TensorSlice
from seer_session.runtime import Runtime
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response

from seer_core.errors import QUOTED, EngineError, OutputError, PromptError, SeerError, printable
from seer_core.ports.weights import WeightSpec, directory
from seer_server.broker import BusyUpdatingError, RolloutBroker
from seer_server.http import Refused, pieces, read_body, read_json, unless_disconnected
from seer_server.shared_buffers import SharedBuffer, open_buffer, receive_buffer
from seer_server.unsupported_fields import FieldError

__all__ = ["Control"]

WaitS = Annotated[float, Meta(ge=0, le=3600)]
"""Seconds to wait for unfinished responses."""

MOST_VERSION = 2**63 - 1
"""The greatest version of weights: an integer that every part of a run can hold."""

LOOK_S = 0.05
"""How often a wait for an instance that has a place looks for one."""

LEAVE_S = 5.0
"""The default; by then the server has noticed that a client has left its requests."""


class SharedWeightsRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """Sealed memory of a process on this machine, which ends with its digest."""

    path: str
    """The memory, as ``/proc/PID/fd/NUMBER``."""
    tensors: list[TensorSlice]
    """The place of each tensor: name, type, shape, first byte, and the byte after the last."""
    digest: Annotated[str, Meta(pattern="^[0-9a-f]{64}$")]
    """The digest of the tensors, as ``seer_host.shared_weights.digest_of`` computes it."""


class UpdateRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The query of ``PUT /v1/weights``, whose body is safetensors."""

    version: Annotated[int, Meta(ge=1, le=MOST_VERSION)] | None = None
    """The version that the weights get, of 63 bits at most. Without it: one more than the present one."""
    wait_s: WaitS = LEAVE_S
    """How long to wait for unfinished responses, and where no instance is there for one."""


class LoadWeightsRequest(UpdateRequest, frozen=True):
    """The body of ``POST /v1/weights``: either a directory or shared memory."""

    directory: Annotated[str, Meta(min_length=1)] | None = None
    """A directory of safetensors on the server's machine, below a root that the server was started with."""
    shared: SharedWeightsRequest | None = None
    """Shared memory on the server's machine."""


class SleepRequest(Struct, frozen=True, forbid_unknown_fields=True):
    """The body of ``POST /v1/sleep``."""

    wait_s: WaitS = LEAVE_S
    """How long to wait for unfinished responses."""


@attrs.define(eq=False)
class Control:
    """Routes for trainers; it holds the buffer of the current weights, if they were sent or shared."""

    broker: RolloutBroker
    weight_roots: Sequence[Path] | None = None
    _buffer: SharedBuffer | None = None
    _receiving: bool = False

    async def update_weights(self, request: Request) -> Response:
        """Load a directory or shared memory."""
        asked = await read_json(request, LoadWeightsRequest)
        match asked.directory, asked.shared:
            case str(path), None:
                if "\0" in path:
                    raise FieldError("directory has a NUL, which no path has; take it out", "directory")
                self._require_below_roots(path)
                return await self._update(request, asked, directory(path))
            case None, SharedWeightsRequest(path, tensors, digest):
                buffer = open_buffer(path, tensors, digest)
                return await self._update(request, asked, buffer.source, buffer)
        raise PromptError("give either directory or shared")

    async def receive_weights(self, request: Request) -> Response:
        """Load weights from the body, which may arrive while requests are unfinished."""
        try:
            asked = msgspec.convert(dict(request.query_params), UpdateRequest, strict=False)
            buffer = await self._receive(request)
        except msgspec.ValidationError as error:
            raise PromptError(f"the query does not fit: {error}") from None
        except OutputError as error:
            raise Refused(413, str(error)) from error
        except ClientDisconnect:
            raise Refused(499, "the weights were not sent to their end") from None
        return await self._update(request, asked, buffer.source, buffer)

    async def _receive(self, request: Request) -> SharedBuffer:
        """Put a body into memory; one at a time, or several would each find the same memory free."""
        if self._receiving:
            raise BusyUpdatingError("other weights are being received; try again in a moment")
        self._receiving = True
        try:
            return await receive_buffer(pieces(request))
        finally:
            self._receiving = False

    def _require_below_roots(self, path: str) -> None:
        """Refuse a directory that the server was not started for."""
        if self.weight_roots is None:
            return
        real = Path(os.path.realpath(path))
        if not any(real.is_relative_to(root) for root in self.weight_roots):
            raise Refused(
                403,
                f"the directory {printable(path, QUOTED)} is below none that the server may load weights"
                " from; start it with --weights-root, or send the weights",
            )

    async def _update(
        self, request: Request, asked: UpdateRequest, source: WeightSpec, buffer: SharedBuffer | None = None
    ) -> Response:
        try:
            self.broker.require_awake()
            async with self._exclusive(request, asked.wait_s) as runtime:
                await _require_places(runtime, asked.wait_s)
                lost = self.broker.instances_lost
                try:
                    loaded = await runtime.update_weights(source, asked.version)
                except EngineError as error:
                    if (
                        runtime.alive and lost == self.broker.instances_lost
                    ):  # they refuse, and none has failed
                        raise Refused(400, str(error)) from error
                    raise
        finally:
            # Instances that start later read the current weights, even if a later step failed.
            old = buffer
            if self.broker.runtime.weight_source is source:
                old, self._buffer = self._buffer, buffer
            if old is not None:
                old.close()
        return JSONResponse({"weight_version": loaded})

    @asynccontextmanager
    async def _exclusive(self, request: Request, wait_s: float) -> AsyncIterator[Runtime]:
        """Yield the runtime as the broker does, unless the client disconnects while it waits."""
        async with AsyncExitStack() as stack:  # releases it also where the cancellation comes too late
            entering = stack.enter_async_context(self.broker.exclusive(wait_s))
            yield await unless_disconnected(request, entering)

    async def sleep(self, request: Request) -> Response:
        """Put the instances to sleep: they give their memory back."""
        asked = await read_json(request, SleepRequest)
        async with self._exclusive(request, asked.wait_s) as runtime:
            freed = await runtime.sleep()
        return JSONResponse({"freed_bytes": freed})

    async def wake(self, request: Request) -> Response:
        """Wake the instances: they take their memory again."""
        await read_body(request)
        if self.broker.runtime.asleep:
            async with self.broker.exclusive() as runtime:
                await runtime.wake()
        return JSONResponse({})

    async def command(self, request: Request) -> Response:
        """Pause the rollout, let it go on, drain or limit an instance, or give up a group."""
        try:
            asked = await read_json(request, RunCommand)
        except PromptError as error:
            if "$.do" in str(error):
                raise PromptError(f"{error}; it is one of {', '.join(COMMANDS)}") from None
            raise
        self.broker.require_rollout()
        by = asked.by or "a client of the server"
        try:
            return JSONResponse({"done": await carry_out(replace(asked, by=by), self.broker.runtime)})
        except SeerError as error:
            raise Refused(400, str(error)) from error

    async def state(self, request: Request) -> Response:
        """Report the loaded version, the unfinished responses and the model's limits."""
        broker, runtime = self.broker, self.broker.runtime
        broker.require_working()
        return JSONResponse(
            {
                "weight_version": runtime.weight_version,
                "asleep": runtime.asleep,
                "changing": broker.changing,
                "unfinished": broker.unfinished,
                "reserved": broker.reserved,
                "instances": list(runtime.alive),
                "max_model_len": runtime.model.max_model_tokens,
                "vocab_size": runtime.model.vocab_size,
            }
        )


async def _require_places(runtime: Runtime, wait_s: float) -> None:
    """Wait until an instance is there, or about to be.

    Raises:
        EngineError: for so long all lacked a place, such as servers that their owner has paused.
    """
    with suppress(TimeoutError):
        async with asyncio.timeout(wait_s):
            while runtime.places_missing:
                await asyncio.sleep(LOOK_S)
    for name, reason in runtime.places_missing.items():
        raise EngineError(f"no instance is there to load weights; {name!r} waits: {reason}")
