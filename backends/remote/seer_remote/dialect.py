"""The contract of dialects: how servers of one kind are asked, and how their answers read."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated, Any, Protocol, TypeVar

import msgspec
from msgspec import Meta
from seer_host.json_files import describe_flaw
from seer_worker.served import ServedCost

from seer_core.errors import EngineError
from seer_core.model.arrays import PromptLogprobs, TopLogprobs
from seer_core.ports.drafting import MOST_COUNT
from seer_core.ports.engine import ChunkJob
from seer_remote.connection import Connection, Malformed

__all__ = [
    "TEXT",
    "AnyCount",
    "Count",
    "Dialect",
    "ServerChunk",
    "ServerFacts",
    "ServerLoad",
    "Unsupported",
    "asked_of_prompt",
    "checked",
    "plain_sampling",
    "read",
    "served_model",
    "unread",
    "with_attachments",
]

T = TypeVar("T")

AnyCount = Annotated[int, Meta(ge=0)]
Count = Annotated[int, Meta(ge=1)]

TEXT = "Hello, world! 3.14159 \u00e4\u00e9\u4f60\u597d\n\tdef f(x): return x ** 2  # 1,000"
"""Two tokenizers that are not one make different tokens of it."""


OWN = (
    "n",
    "best_of",
    "beam_width",
    "stream",
    "stream_options",
    "output_mode",
    "output_kind",
    "max_tokens",
    "max_new_tokens",
    "seed",
    "sampling_seed",
)
"""Fields of requests that decide how an answer reads, or what a chunk is."""


class Unsupported(Exception):
    """The server lacks a call; the message names what starts it with that."""


class ServedModel(msgspec.Struct, frozen=True):
    """One of ``/v1/models``; an adapter has no limit of its own."""

    id: str
    root: str | None = None
    max_model_len: Count | None = None


class ServedModels(msgspec.Struct, frozen=True):
    """Answer of ``/v1/models``."""

    data: list[ServedModel]


class ServerFacts(msgspec.Struct, frozen=True):
    """The description that a server gives of itself."""

    engine: str
    """The engine's name and version."""
    model: str
    """The name by which it serves the model."""
    directory: str
    """The model's directory or name, as the server has it."""
    max_model_tokens: int
    vocab_size: int
    kv_tokens: int
    """The tokens whose KV it holds; 0 where it does not say."""
    block_tokens: int
    max_running: int = 0
    """The most sequences of a step; 0 where it does not say."""
    shares_prompts: bool = False
    tokens_of_text: tuple[int, ...] = ()
    """What its tokenizer makes of ``TEXT``; empty where it does not say."""
    controls: tuple[str, ...] = ()
    """The further fields of ``Sampling`` that it has."""
    whole_controls: tuple[str, ...] = ()
    """Those of them that hold within one request alone: responses under them are not divided."""
    divided_attachments: tuple[str, ...] = ()
    """The fields of attachments under which responses are divided, as in ``ModelInfo``."""
    lacks: tuple[str, ...] = ()
    """What it cannot do as it was started, and how it could, in sentences."""


class ServerLoad(msgspec.Struct, frozen=True):
    """How busy a server is, by all its clients."""

    running: int
    waiting: int
    kv_usage: float
    written: float | None = None
    """The tokens that it has written since its start; None where it does not say."""
    paused: bool = False
    """Whether its owner has paused it or put it to sleep."""


class ServerChunk(msgspec.Struct):
    """A server's answer to a chunk."""

    token_ids: list[int]
    logprobs: list[float]
    ended: str
    """``stop``, ``length`` or ``abort``."""
    cached_tokens: int = 0
    top_logprobs: TopLogprobs | None = None
    """The most probable tokens, where the sampling asks for them."""
    versions: tuple[str, ...] = ()
    """The labels of the weights that wrote it, as far as the server says."""
    prompt_logprobs: PromptLogprobs | None = None
    """The log-probs of the prompt, where the sampling asks for them."""
    attachments: dict[str, Any] = {}
    """The fields of its answer that Seer has none for, where the prompt has attachments."""
    cost: ServedCost = ServedCost()
    """What Seer's half in the server has counted of it; ``cached_tokens`` has its pool's tokens, too."""


class Dialect(Protocol):
    """How one server is asked; errors are those of ``Connection``, and ``Unsupported``."""

    connection: Connection
    names_jobs: bool
    """Whether requests say which responses they are of, to Seer's half in the server."""

    @property
    def max_temperature(self) -> float | None:
        """The highest that it samples with, None without a limit."""
        ...

    async def facts(self) -> ServerFacts:
        """Return what the server says of itself; sets what later calls need."""
        ...

    async def healthy(self) -> bool:
        """Return whether it answers."""
        ...

    async def load(self) -> ServerLoad:
        """Return how busy it is."""
        ...

    async def write(
        self, name: str, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None, salt: str
    ) -> ServerChunk:
        """Have at ``most`` so many tokens written after ``tokens``, under the request id ``name``."""
        ...

    async def end(self, names: Sequence[str]) -> None:
        """Let requests end with what they have; one that the server has not yet is none to it."""
        ...

    async def load_weights(self, directory: str, version: int) -> None:
        """Have it load a directory, and call it so."""
        ...


def read(kind: type[T], body: bytes, what: str) -> T:
    """Return an answer's body as ``kind``.

    Raises:
        Malformed: it is none.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        flaw = error if isinstance(error, msgspec.ValidationError) else describe_flaw(error, body)
        raise Malformed(f"its answer to {what} is none: {flaw}") from error


async def served_model(ask: Connection) -> tuple[ServedModel, int]:
    """Return the model that a server has, not its adapters, and its longest context.

    Raises:
        Malformed: it has none.
    """
    for model in read(ServedModels, await ask.get("/v1/models"), "/v1/models").data:
        if model.max_model_len is not None:
            return model, model.max_model_len
    raise Malformed("it serves no model with a longest context (max_model_len)")


def checked(written: ServerChunk, job: ChunkJob, most: int, vocab_size: int) -> ServerChunk:
    """Return an answer in which everything is as it must be.

    Raises:
        Malformed: it has too many tokens, or tokens, log-probs or counts that are none, or lacks log-probs
            that the job asks for.
    """
    count, width = len(written.token_ids), job.sampling.top_logprobs
    if count and width and not (written.top_logprobs and written.top_logprobs.fits(width, count)):
        raise Malformed(f"it does not report the {width} most probable tokens for each of its {count}")
    if (asked := asked_of_prompt(job)) is not None:
        of_prompt = written.prompt_logprobs
        if of_prompt is None or not of_prompt.fits(asked, len(job.token_ids)):
            raise Malformed("it does not report the log-probs of the prompt")
    if count > most:
        raise Malformed(f"it wrote {count} tokens where {most} were asked for")
    if len(written.logprobs) != count:
        raise Malformed(f"it wrote {count} tokens and {len(written.logprobs)} log-probs")
    if count and not 0 <= min(written.token_ids) <= max(written.token_ids) < vocab_size:
        raise Malformed(f"it wrote a token that is not within the vocabulary of {vocab_size}")
    tops = () if written.top_logprobs is None else written.top_logprobs.token_ids
    if tops and not 0 <= min(tops) <= max(tops) < vocab_size:
        raise Malformed(f"it names a most probable token that is not within the vocabulary of {vocab_size}")
    if not math.isfinite(sum(written.logprobs)) or max(written.logprobs, default=0.0) > 1e-3:
        raise Malformed("it wrote log-probs that are none")
    cost = written.cost
    counts = (written.cached_tokens, cost.pool_tokens, cost.steps, *cost.drafted_at, *cost.accepted_at)
    if not 0 <= min(counts) <= max(counts) <= MOST_COUNT or len(cost.drafted_at) != len(cost.accepted_at):
        raise Malformed("it counted tokens, steps or drafts that cannot be")
    if written.ended not in ("stop", "length", "abort"):
        raise Malformed(f"it ended the chunk for {written.ended!r}")
    if written.ended == "length" and count < most:
        raise Malformed(f"it says that {most} tokens are full, and wrote {count}")
    written.logprobs = [min(each, 0.0) for each in written.logprobs]
    return written


def asked_of_prompt(job: ChunkJob) -> int | None:
    """Return how many others a chunk is to have with the log-probs of its prompt; None without any.

    The first chunk of a response is to have them.
    """
    return job.sampling.prompt_logprobs if len(job.token_ids) == job.prompt_tokens else None


def plain_sampling(job: ChunkJob) -> dict[str, Any]:
    """Return the fields of a job's sampling that all servers name alike."""
    how = job.sampling
    return {
        "temperature": how.temperature,
        "top_p": how.top_p,
        "min_p": how.min_p,
        "repetition_penalty": how.repetition_penalty,
        "ignore_eos": how.ignore_eos,
        "stop_token_ids": list(how.stop_token_ids),
    }


def with_attachments(
    body: dict[str, Any], attachments: Mapping[str, Any], salt: str, replaced: Collection[str] = ()
) -> dict[str, Any]:
    """Return a request with a prompt's own fields, those within ``sampling_params`` among them.

    A field named ``salt`` becomes a part of Seer's own, ``replaced`` ones take the place of Seer's.

    Raises:
        EngineError: one of them is Seer's.
    """
    found = dict(body)
    for name, value in attachments.items():
        mine = found.get(name)
        if name == salt:
            found[name] = f"{mine} {value}"
        elif name in ("sampling_params", "extra_args", "vllm_xargs") and isinstance(value, dict):
            found[name] = with_attachments(mine or {}, value, "")
        elif name in OWN or (mine is not None and name not in replaced):
            raise EngineError(f"attachments name {name!r}, which Seer sends itself; leave it out")
        else:
            found[name] = value
    return found


def unread(body: bytes, own: Collection[str], inner: str, own_inner: Collection[str]) -> dict[str, Any]:
    """Return the fields of an answer, and those of the object in it, that are not Seer's own and not null.

    ``inner`` names that object, or a list that begins with it.
    """
    answer = msgspec.json.decode(body)
    part = answer.get(inner, {})
    part = part[0] if isinstance(part, list) else part
    found = {name: value for name, value in answer.items() if name not in own and name != inner}
    found |= {name: value for name, value in part.items() if name not in own_inner}
    return {name: value for name, value in found.items() if value is not None}
