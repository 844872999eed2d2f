"""The client for programs without an event loop."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from seer_client.calls import Call, Calls, lost
from seer_client.protocol import ClientError, Completion, Progress, Replies, State
from seer_client.weights import NamedTensors, pieces, shared

__all__ = ["Client"]


class Client:
    """Sends requests to ``seer serve``; a context manager, for any number of threads.

    It can be pickled: the copy has the same settings and connections of its own.
    """

    def __init__(
        self,
        url: str,
        token: str | None = None,
        *,
        patience_s: float = 60.0,
        silence_s: float = 60.0,
        progress_s: float = 5.0,
    ) -> None:
        """Take a server's address and, if it asks for one, its token; nothing is sent yet.

        Args:
            url: such as ``http://127.0.0.1:8000``.
            token: what ``seer serve --token-file`` holds; without it, what a server of this user on this
                machine keeps for its port, which is sent to this user's program alone.
            patience_s: for how long to try again where the server cannot be reached, or has sent when there
                will be room.
            silence_s: after how long without a byte an answer that has begun is given up.
            progress_s: how often the server is to send a line of progress.

        Raises:
            ClientError: the address is none.
        """
        self._settings = {"patience_s": patience_s, "silence_s": silence_s, "progress_s": progress_s}
        self._calls = Calls(url, token, **self._settings)
        self._http = httpx.Client(
            **self._calls.options, transport=httpx.HTTPTransport(**self._calls.connections)
        )

    def __getstate__(self) -> tuple[str, str | None, dict[str, float]]:
        return self._calls.url, self._calls.token, self._settings

    def __setstate__(self, state: tuple[str, str | None, dict[str, float]]) -> None:
        url, token, settings = state
        self.__init__(url, token, **settings)  # type: ignore[misc]

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Close the connections."""
        self._http.close()

    def rollout(
        self,
        records: Iterable[Mapping[str, Any]],
        *,
        iteration: int = 0,
        weight_version: int | None = None,
        progress: Callable[[Progress], object] | None = None,
    ) -> Iterator[Completion]:
        """Roll out a batch, and yield completions as they finish; it begins with the first ``next``.

        Leaving the loop, or closing this, aborts the rest.

        Args:
            records: with the fields of a prompts file's lines, such as ``prompt_token_ids``, ``n``, ``seed``.
            iteration: enters the default seeds, as in ``Runtime.groups``.
            weight_version: which weights must be loaded; any if None.
            progress: is called with a ``Progress`` while nothing finishes.

        Raises:
            ClientError: the server refuses it, fails, is lost or stops sending.
        """
        yield from self._completions(self._calls.rollout(records, iteration, weight_version), progress)

    @contextmanager
    def reserve(
        self,
        groups: Iterable[Mapping[str, Any]],
        *,
        iteration: int = 0,
        weight_version: int | None = None,
        prompt_wait_s: float = 2.0,
    ) -> Iterator[None]:
        """Reserve the rows of these groups, for any client, until the end of the ``with`` block.

        Args:
            groups: records with ``group_id`` and ``n``; what is missing comes with the first row requested.
            iteration: as for ``rollout``.
            weight_version: as for ``rollout``.
            prompt_wait_s: seconds for which groups wait for the others' first rows, to begin together.

        Raises:
            ClientError: as ``rollout``.
        """
        call = self._calls.reserve(groups, iteration, weight_version, prompt_wait_s)
        with self._stream(call) as replies:
            reservation = next(replies)
            try:
                yield
            finally:
                with suppress(ClientError):  # the server notices that the connection closes
                    self._answer(self._calls.release(str(reservation)))

    def rollout_row(
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
        """Wait for one row of a reserved group.

        The first row of a group to come brings what the reservation left out; the others' must be the same.
        ``sampling`` are further fields of a prompt's record, such as ``stop`` or ``min_p``.

        Raises:
            ClientError: as ``rollout``; the group is not reserved, or the row was requested before.
        """
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
        (found,) = self._completions(call)
        return found

    def abort(self, groups: Iterable[str] = (), requests: Iterable[str] = ()) -> int:
        """Abort groups and requests, ``GROUP/INDEX``; return how many responses that were.

        A client that waits for one receives it with reason ``aborted``.
        """
        return self._number(self._calls.abort(groups, requests))

    def end_family(self, family: str) -> int:
        """End a family of groups, and return how many trajectories that were; their KV is dropped.

        Records name them by ``family`` and ``trajectories``.  A family that is not known is no error.
        """
        return self._number(self._calls.end_family(family))

    def update_weights(
        self, directory: str | os.PathLike[str], *, version: int | None = None, wait_s: float = 5.0
    ) -> int:
        """Load the safetensors of a directory that the server can read, and return their version.

        Args:
            directory: it lies under the same path on the server's machine.
            version: the trainer's, higher than the current one; the next if None.
            wait_s: for how long to wait for what is unfinished; with 0 it is refused at once.  The server
                needs a moment to notice that a batch was left early.

        Raises:
            ClientError: they were not loaded; the old ones stay.
        """
        return self._number(self._calls.weights(directory, version, wait_s))

    def send_weights(self, tensors: NamedTensors, *, version: int | None = None, wait_s: float = 5.0) -> int:
        """Send tensors, one after the other, have them loaded, and return their version.

        The server holds them in memory until the next update.  They may be sent while others' requests are
        unfinished.

        Args:
            tensors: names as in checkpoints with torch's or numpy's, or ``(dtype, shape, buffer)``.
            version: as for ``update_weights``.
            wait_s: as for ``update_weights``.

        Raises:
            ClientError: as ``update_weights``.
        """
        return self._number(self._calls.sent(pieces(tensors), version, wait_s))

    def share_weights(self, tensors: NamedTensors, *, version: int | None = None, wait_s: float = 5.0) -> int:
        """Have tensors loaded as ``send_weights`` does, from memory shared with a server on this machine."""
        with shared(tensors) as buffer:
            return self._number(self._calls.shared(buffer, version, wait_s))

    def sleep(self, *, wait_s: float = 5.0) -> int:
        """Put the instances to sleep until ``wake``; return the bytes that they free, 0 if they slept."""
        return self._number(self._calls.sleep(wait_s))

    def wake(self) -> None:
        """Wake the instances: they take their memory again."""
        self._answer(self._calls.wake())

    def state(self) -> State:
        """Return the server's weights, instances and unfinished requests."""
        return self._calls.state(self._answer(self._calls.state_request()))

    def _completions(
        self, call: Call, progress: Callable[[Progress], object] | None = None
    ) -> Iterator[Completion]:
        with self._stream(call) as replies:
            for reply in replies:
                if isinstance(reply, Completion):
                    yield reply
                elif isinstance(reply, Progress) and progress is not None:
                    progress(reply)

    @contextmanager
    def _stream(self, call: Call) -> Iterator[Iterator[Completion | Progress | str]]:
        """Yield the lines of an answer; leaving closes the connection if it has not come to its end."""
        response = self._open(call)
        try:
            yield self._read(response)
        finally:
            response.close()

    def _read(self, response: httpx.Response) -> Iterator[Completion | Progress | str]:
        replies = Replies()
        with lost(self._calls.url):
            for data in response.iter_raw():
                yield from replies.feed(data)
        replies.require_complete()

    def _answer(self, call: Call) -> bytes:
        response = self._open(call)
        try:
            with lost(self._calls.url):
                return response.read()
        finally:
            response.close()

    def _number(self, call: Call) -> int:
        return call.number(self._answer(call))

    def _open(self, call: Call) -> httpx.Response:
        """Send a request, again where nothing was taken, and return the answer's beginning."""
        end = time.monotonic() + self._calls.patience_s
        while True:
            try:
                with lost(self._calls.url):
                    request = self._calls.prepared(call, watch=_closing)
                    response = self._http.send(self._http.build_request(**request), stream=True)
                if response.is_success:
                    return response
                with lost(self._calls.url):
                    body = response.read()
                error = self._calls.refusal(response, body)
            except ClientError as failed:
                error = failed
            pause_s = self._calls.pause_s(error, call, end - time.monotonic())
            if pause_s is None:
                raise error
            time.sleep(pause_s)


def _closing(call: Callable[..., None]) -> Callable[..., None]:
    """Return a trace for httpx that closes the connection which it refuses."""

    def closing(event: str, info: Mapping[str, Any]) -> None:
        try:
            call(event, info)
        except ClientError:
            if (stream := info.get("return_value")) is not None:
                stream.close()
            raise

    return closing
