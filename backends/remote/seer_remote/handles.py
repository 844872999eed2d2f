"""Servers that are called as objects of Python's, such as the actors of a framework, and not over HTTP.

A function of the user's returns them by name.  What each must do is in ``Handle``; ``of_actor`` makes one of
an actor of Ray's that has methods of these names.
"""

from __future__ import annotations

import asyncio
import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar, runtime_checkable

import msgspec

from seer_core.error_origin import describe_error, is_ctrl_c
from seer_core.errors import ConfigError, quote
from seer_core.ports.engine import ChunkJob
from seer_remote.connection import Connection, Malformed, RefusedCall
from seer_remote.dialect import ServerChunk, ServerFacts, ServerLoad, Unsupported

__all__ = ["Handle", "HandleRequest", "Handles", "load_handles", "of_actor"]

T = TypeVar("T")

SCHEME = "handle://"
"""Stands before a handle's name where others have an address."""


class HandleRequest(msgspec.Struct, frozen=True):
    """A chunk as a handle gets it."""

    request_id: str
    """Its id, which ``abort`` names."""
    token_ids: list[int]
    """The prompt, and all that was written so far."""
    max_tokens: int
    """The most tokens that may be written."""
    seed: int | None
    """None where the server heeds none."""
    sampling: dict[str, Any]
    """The fields of ``Sampling`` that are set, by vLLM's names."""
    salt: str
    """KV that was written under another salt must not be used."""
    context_tokens: int
    """How many of ``token_ids`` are the prompt to penalties and the like."""
    attachments: Mapping[str, Any]
    """The prompt's own fields, unread."""


@runtime_checkable
class Handle(Protocol):
    """A server's methods; each raises what it likes where the server fails."""

    async def facts(self) -> Mapping[str, Any]:
        """Return the fields of ``ServerFacts``: ``engine``, ``model``, ``max_model_tokens`` and so on."""
        ...

    async def load(self) -> Mapping[str, Any]:
        """Return the fields of ``ServerLoad``: ``running``, ``waiting``, ``kv_usage`` and so on."""
        ...

    async def generate(self, request: HandleRequest) -> Mapping[str, Any]:
        """Return the fields of ``ServerChunk``: ``token_ids``, ``logprobs`` (the model's own), ``ended``."""
        ...

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Let running requests return with what they have; ids that are not there are none to it."""
        ...


class _Actor:
    """A ``Handle`` of an actor of Ray's; its methods take and return plain data."""

    def __init__(self, actor: Any) -> None:
        self._actor = actor

    async def facts(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._actor.facts.remote()
        return found

    async def load(self) -> Mapping[str, Any]:
        found: Mapping[str, Any] = await self._actor.load.remote()
        return found

    async def generate(self, request: HandleRequest) -> Mapping[str, Any]:
        try:
            found: Mapping[str, Any] = await self._actor.generate.remote(msgspec.structs.asdict(request))
        except asyncio.CancelledError:  # of which an actor's method is not notified
            self._actor.abort.remote([request.request_id])
            raise
        return found

    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._actor.abort.remote(list(request_ids))


def of_actor(actor: Any) -> Handle:
    """Return the handle of an actor with the methods ``facts``, ``load``, ``generate`` and ``abort``.

    ``generate`` gets the fields of ``HandleRequest`` as a dict.  An actor of a framework with other methods
    wants a class of one's own in place of this one.
    """
    return _Actor(actor)


class Handles:
    """The dialect of one handle."""

    max_temperature: float | None = None
    names_jobs = False

    def __init__(self, connection: Connection, handle: Handle) -> None:
        self.connection = connection
        self._handle = handle

    async def facts(self) -> ServerFacts:
        """Ask it what it serves."""
        return self._converted(await self._call(self._handle.facts()), ServerFacts, "facts")

    async def healthy(self) -> bool:
        """Return whether it says how busy it is."""
        try:
            await self.load()
        except (RefusedCall, Malformed):
            return False
        return True

    async def load(self) -> ServerLoad:
        """Ask how busy it is."""
        return self._converted(await self._call(self._handle.load()), ServerLoad, "load")

    async def write(
        self, name: str, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None, salt: str
    ) -> ServerChunk:
        """Have a chunk written."""
        how = {key: msgspec.to_builtins(value) for key, value in job.sampling.fields.items()}
        if "min_tokens" in how:
            how["min_tokens"] = min(most, max(0, how["min_tokens"] - len(tokens) + job.context_tokens))
        request = HandleRequest(
            name, list(tokens), most, seed, how, salt, job.context_tokens, job.attachments
        )
        return self._converted(await self._call(self._handle.generate(request)), ServerChunk, "generate")

    async def end(self, names: Sequence[str]) -> None:
        """Abort requests."""
        await self._call(self._handle.abort(names))

    async def load_weights(self, directory: str, version: int) -> None:
        """Refuse: weights are their owner's."""
        raise Unsupported("a handle loads no weights; load them yourself, then call weights_changed()")

    @staticmethod
    async def _call(work: Any) -> Any:
        try:
            return await work
        except Exception as error:  # a user's code, or a dead actor
            raise RefusedCall(500, f"{type(error).__name__}: {error}") from error

    @staticmethod
    def _converted(found: Any, kind: type[T], what: str) -> T:
        try:
            return msgspec.convert(found, kind, from_attributes=True)
        except msgspec.ValidationError as error:
            raise Malformed(f"its answer to {what} is none: {error}") from error


def load_handles(name: str) -> dict[str, Handle]:
    """Return the handles that the function ``MODULE:FUNCTION`` returns, by ``handle://NAME``.

    Raises:
        ConfigError: there is no such function, or it returns something else.
    """
    module, _, function = name.partition(":")
    try:
        make: Callable[[], Mapping[str, Handle]] = getattr(importlib.import_module(module), function)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        fact = describe_error(error, module)
        raise ConfigError(
            f"engine.remote.handles: {quote(name)} cannot be imported ({fact}); write MODULE:FUNCTION"
        ) from error
    try:
        found = make()
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        fact = describe_error(error, make)
        raise ConfigError(f"engine.remote.handles: {quote(name)} raised {fact}; mend it") from error
    if not isinstance(found, Mapping) or not all(isinstance(each, Handle) for each in found.values()):
        raise ConfigError(
            f"engine.remote.handles: {quote(name)} returns no handles by name; each has facts, load, generate"
            " and abort"
        )
    return {f"{SCHEME}{key}": handle for key, handle in found.items()}
