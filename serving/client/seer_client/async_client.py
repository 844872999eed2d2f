"""The client for programs with an event loop."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from typing import Any

import httpx

from seer_client.calls import Call, Calls, lost
from seer_client.protocol import ClientError, Completion, Progress, Replies, State
from seer_client.weights import NamedTensors, pieces, shared

__all__ = ["AsyncClient"]


class AsyncClient:
    """Sends requests as ``Client`` does, where an event loop runs; an async context manager."""

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        patience_s: float = 60.0,
        silence_s: float = 60.0,
        progress_s: float = 5.0,
    ) -> None:
        """Take the arguments of ``Client``."""
        self._settings = {"patience_s": patience_s, "silence_s": silence_s, "progress_s": progress_s}
        self._calls = Calls(url, token, **self._settings)
        self._http = httpx.AsyncClient(
            **self._calls.options, transport=httpx.AsyncHTTPTransport(**self._calls.connections)
        )

    def __getstate__(self) -> tuple[str, str | None, dict[str, float]]:
        return self._calls.url, self._calls.token, self._settings

    def __setstate__(self, state: tuple[str, str | None, dict[str, float]]) -> None:
        url, token, settings = state
        self.__init__(url, token, **settings)  # type: ignore[misc]

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    def rollout(
        self,
        records: Iterable[Mapping[str, Any]],
        *,
        iteration: int = 0,
        weight_version: int | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> AsyncGenerator[Completion, None]:
        """Roll out a batch as ``Client.rollout`` does; ``async for`` over it.

        Close it where you leave the loop early (``contextlib.aclosing``): that aborts the rest.
        """
        return self._completions(self._calls.rollout(records, iteration, weight_version), progress)

    @asynccontextmanager
    async def reserve(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        iteration: int = 0,
        weight_version: int | None = None,
        prompt_wait_s: float = 2.0,
    ) -> AsyncIterator[None]:
        """Reserve rows as ``Client.reserve`` does, within ``async with``."""
        call = self._calls.reserve(groups, iteration, weight_version, prompt_wait_s)
        async with self._stream(call) as replies:
            reservation = await anext(replies)
            try:
                yield
            finally:
                with suppress(ClientError):  # the server notices that the connection closes
                    await self._answer(self._calls.release(str(reservation)))

    async def rollout_row(
        self,
        group_id: str,
        index: int,
        *,
        prompt: str | None = None,
        prompt_token_ids: Sequence[int] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        images: Sequence[str] | None = None,
        max_tokens: int | None = None,
        temperature: float | None = None,
        top_p: float | None = None,
        top_k: int | None = None,
        weight_version: int | None = None,
        **sampling: Any,
    ) -> Completion:
        """Wait for one row of a reserved group, as ``Client.rollout_row`` does; cancelling aborts it."""
        call = self._calls.rollout_row(
            group_id=group_id,
            index=index,
            prompt=prompt,
            prompt_token_ids=prompt_token_ids,
            messages=messages,
            images=images,
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=top_p,
            top_k=top_k,
            weight_version=weight_version,
            **sampling,
        )
        (found,) = [completion async for completion in self._completions(call)]
        return found

    async def abort(self, groups: Iterable[str] = (), requests: Iterable[str] = ()) -> int:
        """Abort groups and requests, as ``Client.abort`` does."""
        return await self._number(self._calls.abort(groups, requests))

    async def end_family(self, family: str) -> int:
        """End a family of groups and its trajectories, as ``Client.end_family`` does."""
        return await self._number(self._calls.end_family(family))

    async def update_weights(
        self, directory: str | os.PathLike[str], *, version: int | None = None, wait_s: float = 5.0
    ) -> int:
        """Load the safetensors of a directory, as ``Client.update_weights`` does."""
        return await self._number(self._calls.weights(directory, version, wait_s))

    async def send_weights(
        self, tensors: NamedTensors, *, version: int | None = None, wait_s: float = 5.0
    ) -> int:
        """Send tensors, as ``Client.send_weights`` does; the event loop waits while each is made."""
        return await self._number(self._calls.sent(_pieces(tensors), version, wait_s))

    async def share_weights(
        self, tensors: NamedTensors, *, version: int | None = None, wait_s: float = 5.0
    ) -> int:
        """Have tensors loaded from shared memory, as ``Client.share_weights`` does.

        A thread makes and copies them; cancelling waits until it has.
        """
        with ExitStack() as stack:
            copying = asyncio.create_task(asyncio.to_thread(stack.enter_context, shared(tensors)))
            try:
                buffer = await asyncio.shield(copying)
            finally:
                await asyncio.wait({copying})
            return await self._number(self._calls.shared(buffer, version, wait_s))

    async def sleep(self, *, wait_s: float = 5.0) -> int:
        """Put the instances to sleep, as ``Client.sleep`` does."""
        return await self._number(self._calls.sleep(wait_s))

    async def wake(self) -> None:
        """Wake the instances: they take their memory again."""
        await self._answer(self._calls.wake())

    async def state(self) -> State:
        """Return the server's state, as ``Client.state`` does."""
        return self._calls.state(await self._answer(self._calls.state_request()))

    async def _completions(
        self, call: Call, progress: Callable[[Progress], object] | None = None
    ) -> AsyncGenerator[Completion, None]:
        async with self._stream(call) as replies:
            async for reply in replies:
                if isinstance(reply, Completion):
                    yield reply
                elif isinstance(reply, Progress) and progress is not None:
                    progress(reply)

    @asynccontextmanager
    async def _stream(self, call: Call) -> AsyncIterator[AsyncIterator[Completion | Progress | str]]:
        """Yield the lines of an answer; leaving closes the connection if it has not come to its end."""
        response = await self._open(call)
        try:
            yield self._read(response)
        finally:
            await response.aclose()

    async def _read(self, response: httpx.Response) -> AsyncIterator[Completion | Progress | str]:
        replies = Replies()
        with lost(self._calls.url):
            async for data in response.aiter_raw():
                for reply in replies.feed(data):
                    yield reply
        replies.require_complete()

    async def _answer(self, call: Call) -> bytes:
        response = await self._open(call)
        try:
            with lost(self._calls.url):
                return await response.aread()
        finally:
            await response.aclose()

    async def _number(self, call: Call) -> int:
        return call.number(await self._answer(call))

    async def _open(self, call: Call) -> httpx.Response:
        """Send a request, again where nothing was taken, and return the answer's beginning."""
        end = time.monotonic() + self._calls.patience_s
        while True:
            try:
                with lost(self._calls.url):
                    request = self._calls.prepared(call, watch=_closing)
                    response = await self._http.send(self._http.build_request(**request), stream=True)
                if response.is_success:
                    return response
                with lost(self._calls.url):
                    body = await response.aread()
                error = self._calls.refusal(response, body)
            except ClientError as failed:
                error = failed
            pause_s = self._calls.pause_s(error, call, end - time.monotonic())
            if pause_s is None:
                raise error
            await asyncio.sleep(pause_s)


def _closing(call: Callable[..., None]) -> Callable[..., Awaitable[None]]:
    """Return a trace for httpx that closes the connection which it refuses."""

    async def closing(event: str, info: Mapping[str, Any]) -> None:
        try:
            call(event, info)
        except ClientError:
            if (stream := info.get("return_value")) is not None:
                await stream.aclose()
            raise

    return closing


async def _pieces(tensors: NamedTensors) -> AsyncIterator[bytes]:
    for piece in pieces(tensors):
        yield piece
