"""Requests and errors of both clients, without a connection."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

import httpx

from seer_client.listeners import require_one, require_own
from seer_client.protocol import ClientError, State, answer, pause_s, plain, plain_ids, refusal, without_none
from seer_client.tokens import token_of

__all__ = ["Call", "Calls", "lost"]

log = logging.getLogger("seer_client")

CONNECT_S = 10.0
SLOW = httpx.Timeout(3600.0, connect=CONNECT_S, pool=None)
"""For an answer without signs of life: weights that load, requests that end before that."""

LOADED = "weight_version"
"""The field of an answer that has the version of weights that were loaded."""

FIRST_PAUSE_S = 0.25
KEEPALIVE = [
    (socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1),
    *(
        (socket.IPPROTO_TCP, getattr(socket, name), value)
        for name, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
        if hasattr(socket, name)
    ),
]
"""So that a machine that is gone is noticed within a minute."""


class Unreached(ClientError):
    """The server could not be reached, and nothing was sent.

    Remedy: start ``seer serve``, or mend the address.
    """


class TryLater(ClientError):
    """The server has taken nothing, and has sent the time to ask again.

    Remedy: ask again after ``pause_s`` seconds; the client does so for as long as its ``patience_s`` lasts.
    """

    def __init__(self, error: ClientError, pause_s: float) -> None:
        super().__init__(str(error), error.status)
        self.pause_s = pause_s


@contextmanager
def lost(url: str) -> Iterator[None]:
    """Turn what a connection raises into a ``ClientError``."""
    try:
        yield
    except (httpx.ConnectError, httpx.ConnectTimeout) as error:
        raise Unreached(
            f"no server can be reached at {url} ({_fact(error)}); start it: seer serve"
        ) from error
    except httpx.TimeoutException as error:
        raise ClientError(f"the server at {url} has stopped sending; look into its log") from error
    except (httpx.HTTPError, httpx.InvalidURL, httpx.StreamError) as error:
        raise ClientError(
            f"the server at {url} was lost ({_fact(error)}); once it runs again, ask again:"
            " the same ids and seeds give the same tokens"
        ) from error


def _fact(error: Exception) -> str:
    return str(error) or type(error).__name__


@dataclass(frozen=True)
class Call:
    """A request for httpx to send; ``repeatable`` unless its body can be read once.

    Where the answer is one number, that is its field ``result``.
    """

    request: dict[str, Any]
    repeatable: bool = True
    result: str = ""

    def number(self, body: bytes) -> int:
        """Read the number that an answer is."""
        (number,) = answer(body, self.result)
        return int(number)


class Calls:
    """Makes the requests of a client, and reads the short answers."""

    def __init__(
        self, url: str, token: str | None, patience_s: float, silence_s: float, progress_s: float
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise ClientError(f"the server's address is {url!r}; write one like http://127.0.0.1:8000")
        self.url = url.rstrip("/").removesuffix("/v1")  # which OpenAI's client has to be given
        self.token = token
        """The one that was given; without it, that of the server's file is read for each request."""
        self.patience_s = patience_s
        self._has_warned = False
        self._progress_s = progress_s
        self._silence_s = silence_s

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of httpx's clients, but for their transports."""
        return {
            "base_url": self.url,
            "timeout": httpx.Timeout(self._silence_s, connect=CONNECT_S, pool=None),
        }

    def prepared(self, call: Call, *, watch: Callable[[Callable[..., None]], object]) -> dict[str, Any]:
        """Return the arguments of a request, with the token.

        The token of a server's file is sent to a program of the same user alone: httpx calls the ``trace``
        before and after it connects, which ``watch`` makes of a plain function.
        """
        own = self.token is None
        token = token_of(self.url) if own else self.token
        if token is None:
            return call.request
        headers = {**call.request.get("headers", {}), "Authorization": f"Bearer {token}"}
        if not own:
            return {**call.request, "headers": headers}
        return {**call.request, "headers": headers, "extensions": {"trace": watch(self._watch)}}

    def _watch(self, event: str, info: Mapping[str, Any]) -> None:
        """Refuse a connection to another user's program."""
        port = httpx.URL(self.url).port or 0
        if event == "connection.connect_tcp.started":
            require_one(port)
        elif event == "connection.connect_tcp.complete":
            address, *_ = info["return_value"].get_extra_info("server_addr")
            require_own(address, port)

    @property
    def connections(self) -> dict[str, Any]:
        """Arguments of httpx's transports: as many connections as there are requests at a time."""
        # A server closes a connection that is idle for 5 s, and must not do so just as it is used again.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0)
        return {"limits": limits, "socket_options": KEEPALIVE}

    def rollout(
        self, records: Iterable[Mapping[str, Any]], iteration: int, weight_version: int | None
    ) -> Call:
        """Return the request for a batch."""
        body = {"records": plain(records), "iteration": iteration}
        return self._stream("/v1/rollouts", **body, weight_version=weight_version, encoding="base64")

    def reserve(
        self,
        groups: Iterable[Mapping[str, Any]],
        iteration: int,
        weight_version: int | None,
        prompt_wait_s: float,
    ) -> Call:
        """Return the request that reserves groups."""
        body = {"groups": plain(groups), "iteration": iteration, "prompt_wait_s": prompt_wait_s}
        return self._stream("/v1/reservations", **body, weight_version=weight_version)

    def release(self, reservation: str) -> Call:
        """Return the request that closes a reservation."""
        timeout = httpx.Timeout(CONNECT_S)
        request = {"method": "DELETE", "url": f"/v1/reservations/{reservation}", "timeout": timeout}
        return Call(request, repeatable=False)

    def rollout_row(self, prompt_token_ids: Sequence[int] | None, **fields: Any) -> Call:
        """Return the request for a row."""
        ids = plain_ids(prompt_token_ids)
        return self._stream("/v1/rows", prompt_token_ids=ids, **fields, encoding="base64")

    def abort(self, groups: Iterable[str], requests: Iterable[str]) -> Call:
        """Return the request that aborts groups and requests."""
        return self._post("/v1/abort", "aborted", groups=list(groups), requests=list(requests))

    def end_family(self, family: str) -> Call:
        """Return the request that ends a family."""
        url = f"/v1/groups/{quote(family, safe='')}"
        return Call({"method": "DELETE", "url": url, "timeout": httpx.Timeout(CONNECT_S)}, result="ended")

    def weights(self, directory: str | os.PathLike[str], version: int | None, wait_s: float) -> Call:
        """Return the request that loads a directory; a relative one begins where this process is."""
        path = os.path.abspath(directory)
        return self._post("/v1/weights", LOADED, directory=path, version=version, wait_s=wait_s)

    def shared(self, buffer: Mapping[str, Any], version: int | None, wait_s: float) -> Call:
        """Return the request that loads shared memory."""
        return self._post("/v1/weights", LOADED, shared=buffer, version=version, wait_s=wait_s)

    def sent(self, content: Any, version: int | None, wait_s: float) -> Call:
        """Return the request that brings tensors."""
        params = without_none(version=version, wait_s=wait_s)
        headers = {"Content-Type": "application/octet-stream"}
        request = {"method": "PUT", "url": "/v1/weights", "params": params, "headers": headers}
        return Call({**request, "content": content, "timeout": SLOW}, repeatable=False, result=LOADED)

    def sleep(self, wait_s: float) -> Call:
        """Return the request that puts the instances to sleep."""
        return self._post("/v1/sleep", "freed_bytes", wait_s=wait_s)

    def wake(self) -> Call:
        """Return the request that wakes them."""
        return self._post("/v1/wake")

    def state_request(self) -> Call:
        """Return the request for the server's state."""
        return Call({"method": "GET", "url": "/v1/state"})

    def state(self, body: bytes) -> State:
        """Read the server's state."""
        return State(*answer(body, *State.__dataclass_fields__))

    def refusal(self, response: httpx.Response, body: bytes) -> ClientError:
        """Return the error that an answer is."""
        error = refusal(response.status_code, body)
        if response.status_code == 401 and self.token is None:
            sent, now = response.request.headers.get("Authorization"), token_of(self.url)
            if now is not None and sent != f"Bearer {now}":
                return TryLater(error, 0.0)  # the server was started again
        pause = pause_s(response.status_code, response.headers)
        return error if pause is None else TryLater(error, pause)

    def pause_s(self, error: ClientError, call: Call, left_s: float) -> float | None:
        """Return after how long to ask again; None if that is not safe, or no use."""
        pause = error.pause_s if isinstance(error, TryLater) else FIRST_PAUSE_S
        safe = call.repeatable and isinstance(error, TryLater | Unreached)
        if not safe or pause > left_s:
            return None
        if isinstance(error, Unreached) and not self._has_warned:
            log.warning("%s; trying for %.0f s", error, self.patience_s)
            self._has_warned = True
        return pause

    def _stream(self, path: str, **fields: Any) -> Call:
        body = without_none(**fields, progress_s=self._progress_s)
        return Call({"method": "POST", "url": path, "json": body})

    def _post(self, path: str, result: str = "", **fields: Any) -> Call:
        request = {"method": "POST", "url": path, "json": without_none(**fields), "timeout": SLOW}
        return Call(request, result=result)
