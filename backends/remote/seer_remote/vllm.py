"""``vllm serve``: tokens in and out by its own route, or by OpenAI's completions where that is off."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec
from msgspec import Struct, field
from seer_worker.served import ENDS_EARLY, JOB, ServedCost, ServedParameters, job_argument

from seer_core.model.arrays import LEAST_LOGPROB, Logprobs, PromptLogprobs, TopLogprobs
from seer_core.ports.engine import ChunkJob
from seer_remote.connection import Connection, Malformed, RefusedCall, Unreachable
from seer_remote.dialect import (
    TEXT,
    AnyCount,
    ServerChunk,
    ServerFacts,
    ServerLoad,
    Unsupported,
    asked_of_prompt,
    plain_sampling,
    read,
    served_model,
    unread,
    with_attachments,
)
from seer_remote.fields import VLLM, VLLM_SAMPLING, divided, holding

__all__ = ["CONTROLS", "Vllm"]

CONTROLS = (
    "min_p",
    "repetition_penalty",
    "logit_bias",
    "allowed_token_ids",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "top_logprobs",
    "prompt_logprobs",
    "include_stop_str_in_output",
)
"""What depends on the tokens before a place, and not on where the chunk begins."""

WHOLE_CONTROLS = ("stop", "structured_outputs")
"""What does, for vLLM sees a chunk's context as a prompt."""

PENALTIES = ("presence_penalty", "frequency_penalty")
"""What does too, but where ``seer-vllm`` samples: it is sent where the prompt ends."""

KEYED_CONTROLS = ("bad_words",)
"""What ``seer-vllm`` alone takes as token ids."""

GENERATE = "/inference/v1/generate"
COMPLETIONS = "/v1/completions"
NO_TOKEN = 2**31 - 1
"""A token that no vocabulary has: vLLM refuses a bias for it by naming the vocabulary's size."""
KEYED = "Seer samples by key"
"""So ``seer-vllm`` answers ``extra_args`` that have ``seer``."""
OWN_ANSWER = ("request_id", "id", "object", "created", "model", "usage", "output_mode", "prompt_logprobs")
OWN_CHOICE = ("index", "token_ids", "finish_reason", "logprobs", "text", "weight_versions", "prompt_logprobs")
"""The fields of an answer and of its choice that are read."""
VOCABULARY = re.compile(r"[Vv]ocabulary size: (\d+)")
SLOW_S = 60.0
"""How long vLLM may take to describe its machine."""

SCALE_OUT = (
    "start it with --enable-scale-out: then chunks can be ended early, and its answers name the weights"
)
DEVELOPER = "start it with VLLM_SERVER_DEV_MODE=1 in its environment"
DETAILS = "start it with --enable-prompt-tokens-details: then it says which tokens its cache had"


class Version(Struct):
    """Answer of ``/version``."""

    version: str


class VllmText(Struct):
    """Answer of ``/tokenize``."""

    tokens: list[int]


class Scheduling(Struct):
    """Part of ``/server_info``."""

    max_num_seqs: AnyCount = 0


class Configuration(Struct):
    """Part of ``/server_info``."""

    scheduler_config: Scheduling = field(default_factory=Scheduling)


class Info(Struct):
    """Answer of ``/server_info``."""

    vllm_config: Configuration


class Paused(Struct):
    """Answer of ``/is_paused`` and ``/is_sleeping``."""

    is_paused: bool = False
    is_sleeping: bool = False


class Details(Struct):
    """Part of the usage of an answer."""

    cached_tokens: int | None = None


class Usage(Struct):
    """The cost of an answer."""

    prompt_tokens_details: Details | None = None


class Probability(Struct):
    """A token's log-prob."""

    logprob: float
    token_id: int = -1
    top_logprobs: list[Probability] = []


class Probabilities(Struct):
    """Log-probs of an answer's tokens."""

    content: list[Probability]


class Ranked(Struct):
    """A log-prob of a token of the prompt, or of another in its place."""

    logprob: float


class Span(Struct):
    """Tokens that weights of one label have written."""

    version: str


class VllmChoice(Struct):
    """The response of ``GENERATE``."""

    token_ids: list[int] | None
    finish_reason: str | None
    logprobs: Probabilities | None
    weight_versions: list[Span] | None = None


class VllmGenerated(Struct):
    """Answer of ``GENERATE``."""

    request_id: str
    choices: list[VllmChoice]
    usage: Usage | None = None
    prompt_logprobs: list[dict[str, Ranked] | None] | None = None
    kv_transfer_params: ServedParameters | None = None


class TokenLogprobs(Struct):
    """Log-probs of a completion's tokens."""

    token_logprobs: list[float]
    top_logprobs: list[dict[str, float] | None] | None = None


class CompletionChoice(Struct):
    """The response of ``COMPLETIONS``."""

    finish_reason: str | None
    logprobs: TokenLogprobs | None
    token_ids: list[int] | None = None
    prompt_logprobs: list[dict[str, Ranked] | None] | None = None


class Completed(Struct):
    """Answer of ``COMPLETIONS``."""

    id: str
    choices: list[CompletionChoice]
    usage: Usage | None = None
    kv_transfer_params: ServedParameters | None = None


class Vllm:
    """A ``vllm serve``."""

    max_temperature: float | None = 2.0
    names_jobs = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._model = ""
        self._scale_out = True
        self._developer = False

    async def facts(self) -> ServerFacts:
        """Ask for its models, its KV, its vocabulary, and what is enabled."""
        ask = self.connection
        version = read(Version, await ask.get("/version"), "/version").version
        model, longest = await served_model(ask)
        self._model = model.id
        kv_tokens, block_tokens, shares = _cache(await ask.get("/metrics"))
        self._scale_out, vocab_size, keyed = await self._find_generate()
        info = await self._optional(Info, "/server_info?config_format=json", SLOW_S)
        self._developer = info is not None
        lacks = [] if self._scale_out else [SCALE_OUT]
        return ServerFacts(
            engine=f"vLLM {version}",
            model=model.id,
            directory=model.root or model.id,
            max_model_tokens=longest,
            vocab_size=vocab_size,
            kv_tokens=kv_tokens,
            block_tokens=block_tokens,
            max_running=0 if info is None else info.vllm_config.scheduler_config.max_num_seqs,
            shares_prompts=shares,
            tokens_of_text=await self._tokens_of_text(),
            controls=CONTROLS + WHOLE_CONTROLS + PENALTIES + (KEYED_CONTROLS if keyed else ()),
            whole_controls=WHOLE_CONTROLS if keyed else WHOLE_CONTROLS + PENALTIES,
            divided_attachments=(*divided(VLLM, VLLM_SAMPLING), *holding(VLLM_SAMPLING)),
            lacks=tuple(lacks),
        )

    async def healthy(self) -> bool:
        """Ask ``/health``."""
        try:
            await self.connection.get("/health", 5.0)
        except (Unreachable, RefusedCall):
            return False
        return True

    async def load(self) -> ServerLoad:
        """Read its figures for Prometheus, and whether it is paused."""
        figures = await self.connection.get("/metrics")
        paused = False
        if self._developer:
            for path in ("/is_paused", "/is_sleeping"):
                answer = await self._optional(Paused, path)
                paused |= answer is not None and (answer.is_paused or answer.is_sleeping)
        return ServerLoad(
            running=int(_sum(figures, b"vllm:num_requests_running")),
            waiting=int(_sum(figures, b"vllm:num_requests_waiting")),
            kv_usage=min(1.0, max(_values(figures, b"vllm:kv_cache_usage_perc"), default=0.0)),
            written=_sum(figures, b"vllm:generation_tokens_total"),
            paused=paused,
        )

    async def write(
        self, name: str, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None, salt: str
    ) -> ServerChunk:
        """Have a chunk written."""
        how, width = self._sampling(job, tokens, most, seed), job.sampling.top_logprobs
        if self._scale_out:
            body = {"request_id": name, "token_ids": tokens, "sampling_params": how, "cache_salt": salt}
            body = with_attachments(body, job.attachments, "cache_salt")
            returned = await self.connection.post(GENERATE, body, None)
            answer = read(VllmGenerated, returned, "a chunk")
            self._expect(answer.request_id, f"generate-tokens-{name}", answer.choices)
            [choice] = answer.choices
            content = [] if choice.logprobs is None else choice.logprobs.content
            return ServerChunk(
                choice.token_ids or [],
                [each.logprob for each in content],
                _ended(choice.finish_reason),
                _cached(answer.usage),
                _most_probable(width, [[(a.token_id, a.logprob) for a in b.top_logprobs] for b in content]),
                tuple(each.version for each in choice.weight_versions or ()),
                _of_prompt(job, answer.prompt_logprobs),
                _unread(returned) if job.attachments else {},
                _cost(answer.kv_transfer_params),
            )
        body = how | {
            "request_id": name,
            "model": self._model,
            "prompt": tokens,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        body = with_attachments(body, job.attachments, "cache_salt", replaced=("model",))
        returned = await self.connection.post(COMPLETIONS, body, None)
        found = read(Completed, returned, "a chunk")
        self._expect(found.id, f"cmpl-{name}", found.choices)
        [response] = found.choices
        if response.token_ids is None:
            raise Malformed("it returns no token ids; take a vLLM of 0.10.2 or later")
        logprobs = [] if response.logprobs is None else response.logprobs.token_logprobs
        tops = None if response.logprobs is None else response.logprobs.top_logprobs
        pairs = [[(_token(name), each) for name, each in (top or {}).items()] for top in tops or ()]
        return ServerChunk(
            response.token_ids,
            logprobs,
            _ended(response.finish_reason),
            _cached(found.usage),
            _most_probable(width, pairs),
            prompt_logprobs=_of_prompt(job, response.prompt_logprobs),
            attachments=_unread(returned) if job.attachments else {},
            cost=_cost(found.kv_transfer_params),
        )

    async def end(self, names: Sequence[str]) -> None:
        """Abort requests: their answers come with what they have."""
        if self._scale_out:
            ids = [f"generate-tokens-{name}" for name in names]
            await self.connection.post("/inference/v1/abort_requests", {"request_ids": ids})
        elif self._developer:
            await self.connection.post(
                "/abort_requests", {"request_ids": [f"cmpl-{name}-0" for name in names]}
            )

    async def load_weights(self, directory: str, version: int) -> None:
        """Have its workers load a checkpoint."""
        body = {"method": "reload_weights", "kwargs": {"weights_path": directory}}
        try:
            await self.connection.post("/collective_rpc", body, None)
            await self.connection.post("/update_weight_version", {"new_version": str(version)})
        except RefusedCall as error:
            if error.status == 404:
                raise Unsupported(f"it has no call that loads weights; {DEVELOPER}") from error
            raise

    def _sampling(self, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None) -> dict[str, Any]:
        """Return all that decides a token: what is left out has the server's defaults, not vLLM's."""
        how = job.sampling
        given = plain_sampling(job) | {
            "top_k": how.top_k,
            "presence_penalty": how.presence_penalty,
            "frequency_penalty": how.frequency_penalty,
            "max_tokens": most,
            "min_tokens": min(most, max(0, how.min_tokens - len(tokens) + job.context_tokens)),
            # The token itself comes first, and pushes out the last of the most probable ones.
            "logprobs": how.top_logprobs + 1 if how.top_logprobs else 0,
        }
        extra: dict[str, Any] = {JOB: job_argument(job)} if self.names_jobs else {}
        if job.may_end_early:
            extra[ENDS_EARLY] = 1
        if how.presence_penalty or how.frequency_penalty or how.bad_words:
            extra["context_tokens"] = job.context_tokens
        if how.bad_words:
            extra["bad_words"] = " ".join(",".join(map(str, word)) for word in how.bad_words)
        if extra:
            given["extra_args" if self._scale_out else "vllm_xargs"] = extra
        if how.stop:
            given["stop"] = list(how.stop)
        if how.structured_outputs is not None:
            given["structured_outputs"] = msgspec.to_builtins(how.structured_outputs)
        if (asked := asked_of_prompt(job)) is not None:
            given["prompt_logprobs"] = asked
        if self._scale_out:
            given["detokenize"] = bool(how.stop)
        else:
            given["return_tokens_as_token_ids"] = True
        if how.logit_bias:
            given["logit_bias"] = {str(token): bias for token, bias in how.logit_bias.items()}
        if how.allowed_token_ids:
            given["allowed_token_ids"] = list(how.allowed_token_ids)
        if seed is not None:
            given["seed"] = seed
        return given

    async def _find_generate(self) -> tuple[bool, int, bool]:
        """Return whether it has a route for tokens, the vocabulary's size, and whether Seer samples there."""
        bad = {"max_tokens": 1, "logit_bias": {str(NO_TOKEN): 0.0}}
        tokens = {"token_ids": [1], "sampling_params": bad | {"extra_args": {"seer": 1}}}
        prompt = bad | {"model": self._model, "prompt": [1], "vllm_xargs": {"seer": 1}}
        for path, body in ((GENERATE, tokens), (COMPLETIONS, prompt)):
            try:
                await self.connection.post(path, body)
            except RefusedCall as error:
                if path == GENERATE and error.status in (403, 404):
                    continue
                if (found := VOCABULARY.search(error.text)) is not None:
                    return path == GENERATE, int(found[1]), KEYED in error.text
                raise
        raise Malformed("it does not say how large the vocabulary is")

    async def _tokens_of_text(self) -> tuple[int, ...]:
        body = {"model": self._model, "prompt": TEXT, "add_special_tokens": True}
        try:
            return tuple(read(VllmText, await self.connection.post("/tokenize", body), "/tokenize").tokens)
        except (RefusedCall, Malformed):
            return ()

    async def _optional(self, kind: type[Any], path: str, limit_s: float = 10.0) -> Any:
        """Return the answer of a call that not every server has, or None."""
        try:
            return read(kind, await self.connection.get(path, limit_s), path)
        except (RefusedCall, Malformed):
            return None

    @staticmethod
    def _expect(found: str, wanted: str, choices: Sequence[object]) -> None:
        if found != wanted:
            raise Malformed(f"it answers request {found!r} where {wanted!r} was asked for")
        if len(choices) != 1:
            raise Malformed(f"it answers with {len(choices)} responses in place of one")


def _most_probable(width: int, places: Sequence[Sequence[tuple[int, float]]]) -> TopLogprobs | None:
    """Return the most probable tokens at each place, which come with the token itself somewhere among them.

    Raises:
        Malformed: there are too few.
    """
    if not width:
        return None
    tokens: list[int] = []
    logprobs: list[float] = []
    for pairs in places:
        best = sorted(pairs, key=lambda pair: -pair[1])[:width]
        if len(best) < width:
            raise Malformed(f"it reports {len(best)} of the {width} most probable tokens")
        tokens += [token for token, _ in best]
        logprobs += [max(logprob, LEAST_LOGPROB) for _, logprob in best]
    return TopLogprobs(width, tokens, logprobs)


def _of_prompt(job: ChunkJob, places: Sequence[dict[str, Ranked] | None] | None) -> PromptLogprobs | None:
    """Return the log-probs of the prompt, where a chunk asks for them.

    Raises:
        Malformed: there are others.
    """
    if (width := asked_of_prompt(job)) is None:
        return None
    prompt = job.token_ids
    if places is None or len(places) != len(prompt):
        raise Malformed("it reports no log-probs of the prompt")
    pairs = [[(int(token), each.logprob) for token, each in (place or {}).items()] for place in places[1:]]
    own = [dict(place).get(token) for place, token in zip(pairs, prompt[1:], strict=True)]
    if None in own:
        raise Malformed("it reports log-probs of another prompt")
    logprobs = Logprobs([max(min(each or 0.0, 0.0), LEAST_LOGPROB) for each in own])
    return PromptLogprobs(logprobs, _most_probable(width, pairs))


def _unread(body: bytes) -> dict[str, Any]:
    return unread(body, OWN_ANSWER, "choices", OWN_CHOICE)


def _token(name: str) -> int:
    """Return the token that a completion names as ``token_id:N``."""
    digits = name.removeprefix("token_id:")
    if not digits.isdigit():
        raise Malformed(f"it names a token {name!r}, not by its id")
    return int(digits)


def _cost(parameters: ServedParameters | None) -> ServedCost:
    return (None if parameters is None else parameters.seer) or ServedCost()


def _ended(reason: str | None) -> str:
    """Return why a chunk has ended; of ``repetition_detection`` the answer's ``stop_reason`` says it."""
    return "stop" if reason == "repetition" else reason or ""


def _cached(usage: Usage | None) -> int:
    details = None if usage is None else usage.prompt_tokens_details
    return 0 if details is None else details.cached_tokens or 0


def _lines(figures: bytes, name: bytes) -> Iterator[bytes]:
    """Yield the lines of a figure, one for each engine of the server."""
    wanted = name + b"{"
    return (line for line in figures.splitlines() if line.startswith(wanted))


def _values(figures: bytes, name: bytes) -> Iterator[float]:
    for line in _lines(figures, name):
        try:
            value = float(line.rpartition(b" ")[2])
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            raise Malformed(f"its figure {name.decode()} is no number")
        yield value


def _sum(figures: bytes, name: bytes) -> float:
    return sum(_values(figures, name))


def _cache(figures: bytes) -> tuple[int, int, bool]:
    """Return the tokens of KV, those of a block, and whether prefixes are shared; 0 where nothing says so."""
    tokens, block, shares = 0, 1, False
    for line in _lines(figures, b"vllm:cache_config_info"):
        labels = dict(re.findall(r'(\w+)="([^"]*)"', line.decode("utf-8", "replace")))
        shares = labels.get("enable_prefix_caching") == "True"
        size, blocks, held = (
            labels.get(name, "") for name in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens")
        )
        if not size.isdigit() or int(size) == 0:
            continue
        block = int(size)
        if held.isdigit():
            tokens += max(0, int(held) // block - 1) * block  # one is vLLM's null block
        elif blocks.isdigit():
            tokens += max(0, int(blocks) - 1) * block
    return tokens, block, shares
