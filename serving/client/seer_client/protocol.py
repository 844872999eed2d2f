"""The messages that a server sends, and how they are read."""

from __future__ import annotations

import base64
import json
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

__all__ = ["ClientError", "Completion", "Progress", "Replies", "State", "pause_s", "refusal", "without_none"]

LONGEST_FAULT = 300
"""Characters of an answer that an error quotes."""


class ClientError(Exception):
    """A request has failed, for a reason that is one sentence.

    ``status`` is the server's: 400 for a request that cannot be rolled out, 401 without its token, 404 for a
    group that is not reserved, 409 where versions, sleep or other requests stand against it, 429 where there
    is no room, 503 where its engines have failed; None if the server was not reached or was lost, or its
    answer cannot be read.

    Remedy: the message names it; the same ids and seeds give the same tokens when a batch is sent again.
    """

    def __init__(self, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.status = status

    def __reduce__(self) -> tuple[Any, ...]:
        return ClientError, (str(self), self.status)


@dataclass(frozen=True)
class Completion:
    """One response: ``token_ids`` are an array of int32, ``logprobs`` one of float32 of the same length.

    ``logprobs`` are those of the sampled tokens under the raw model distribution (temperature 1, no top-k or
    top-p), in nats.  ``finish_reason`` is ``stop``, ``length``, ``error`` or ``aborted``.  ``chunks`` is how
    many pieces it was written in, on these ``instances``.  ``text`` is None without a tokenizer.
    """

    request_id: str
    """The request, as ``GROUP/INDEX``."""
    group_id: str
    """The group that it is of."""
    index: int
    """The response's number within its group, from 0."""
    seed: int
    """The seed with which its tokens were drawn."""
    token_ids: array[int]
    logprobs: array[float]
    text: str | None
    finish_reason: str
    weight_version: int
    """The version of the weights that wrote it."""
    chunks: int
    instances: Sequence[str]
    metadata: Mapping[str, Any]
    """The prompt's own data."""
    stop_reason: str | int | None = None
    """The stop string or the stop token at which it ended."""
    top_logprobs: Sequence[Sequence[tuple[int, float]]] | None = None
    """For each token the most probable tokens in its place, pairs of token id and log-prob, where the prompt
    asks for them.
    """
    prompt_logprobs: Mapping[str, Any] | None = None
    """The same of the prompt's tokens but its first: ``logprobs``, and ``top_logprobs`` or None."""
    attachments: Mapping[str, Any] = field(default_factory=dict)
    """What the engine has answered besides, with the last chunk; ``routed_experts`` are those of all
    positions, as ``seer_host.routed_experts.unpacked`` reads them.
    """


@dataclass(frozen=True)
class Progress:
    """Progress of a batch: its requests, those that have finished, and tokens up to the last chunks' ends."""

    requests: int
    """The responses of the batch."""
    finished: int
    """Those that have finished."""
    tokens: int = 0
    """The tokens of all of them, up to the ends of their last chunks."""


@dataclass(frozen=True)
class State:
    """The state of a server: ``unfinished`` responses, ``reserved`` rows, the model's limits in tokens.

    While it is ``changing``, because weights or sleep wait or are under way, it takes no requests.
    """

    weight_version: int
    """The version of the weights that answer requests."""
    asleep: bool
    """Whether the instances sleep."""
    changing: bool
    unfinished: int
    reserved: int
    instances: Sequence[str]
    """The instances that take chunks."""
    max_model_len: int
    """The most tokens of a prompt and its response."""
    vocab_size: int
    """The number of token ids."""


class Replies:
    """Reads a stream of lines: completions, progress, and how it ends."""

    def __init__(self) -> None:
        self._parts: list[bytes] = []
        self._over = False

    def feed(self, data: bytes) -> Iterator[Completion | Progress | str]:
        """Yield the messages in more bytes; a reservation begins with its id.

        Raises:
            ClientError: the request has failed, or this is no answer of ``seer serve``.
        """
        *lines, rest = data.split(b"\n")
        for line in lines:
            self._parts.append(line)
            whole = b"".join(self._parts)
            self._parts.clear()
            yield from self._read(whole)
        if rest:
            self._parts.append(rest)

    def require_complete(self) -> None:
        """Make sure that the stream was not cut.

        Raises:
            ClientError: it was.
        """
        if not self._over:
            raise ClientError(
                "the server's answer was cut; ask again: the same ids and seeds give the same tokens"
            )

    def _read(self, line: bytes) -> Iterator[Completion | Progress | str]:
        try:
            message = json.loads(line)
            ((kind, value),) = message.items()
            if kind == "completion":
                yield _completion(value)
            elif kind == "progress":
                yield Progress(**value)
            elif kind == "reserved":
                yield str(value["id"])
            elif kind == "done":
                self._over = True
            elif kind == "error":
                raise ClientError(value["message"], value["code"])
            else:
                raise ValueError(f"a line of kind {kind!r}")
        except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
            raise ClientError(f"the server answers nonsense ({error}): {_quote(line)}") from error


def _completion(value: dict[str, Any]) -> Completion:
    token_ids, logprobs = (
        base64.b64decode(value.pop(name), validate=True) for name in ("token_ids", "logprobs")
    )
    if (tops := value.pop("top_logprobs", None)) is not None:
        value["top_logprobs"] = [[(token, logprob) for token, logprob in top] for top in tops]
    found = Completion(token_ids=array("i", token_ids), logprobs=array("f", logprobs), **value)
    if len(found.token_ids) != len(found.logprobs):
        raise ValueError("tokens and log-probs are not of one number")
    return found


def refusal(status: int, body: bytes) -> ClientError:
    """Return the error that an answer with this status is."""
    try:
        message = json.loads(body)["error"]["message"]
        return ClientError(str(message), status)
    except (ValueError, TypeError, KeyError, RecursionError):
        return ClientError(f"the server answers {status}: {_quote(body)}", status)


def pause_s(status: int, headers: Mapping[str, str]) -> float | None:
    """Return after how many seconds to ask again, if the server has taken nothing and has sent when."""
    if status not in (429, 503) or "retry-after" not in headers:
        return None
    try:
        return max(0.0, float(headers["retry-after"]))
    except ValueError:
        return None


def answer(body: bytes, *names: str) -> list[Any]:
    """Return these fields of an answer.

    Raises:
        ClientError: a field is missing, or it is no JSON.
    """
    try:
        found = json.loads(body)
        return [found[name] for name in names]
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ClientError(f"the server answers nonsense ({error!r}): {_quote(body)}") from error


def without_none(**fields: Any) -> dict[str, Any]:
    """Return the fields that are not None."""
    return {name: value for name, value in fields.items() if value is not None}


def plain(records: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return records whose token ids are lists of Python's own numbers, from any kind of array.

    Raises:
        ClientError: they are no list of objects.
    """
    records = list(records) if isinstance(records, Iterable) else [records]
    if wrong := [each for each in records if not isinstance(each, Mapping)]:
        raise ClientError(
            f"{wrong[0]!r:.100} is no record; give a list of objects, such as [{{'prompt': 'x'}}]"
        )
    return [
        {name: plain_ids(value) if name == "prompt_token_ids" else value for name, value in each.items()}
        for each in records
    ]


def plain_ids(token_ids: Any) -> Any:
    """Return token ids as a list of Python's own numbers."""
    return token_ids if isinstance(token_ids, list | None) else [int(each) for each in token_ids]


def _quote(body: bytes) -> str:
    text = body.decode("utf-8", "replace")
    return repr(text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}...")
