"""SGLang's servers: ``/generate`` with token ids."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from typing import Any

from msgspec import Raw, Struct

from seer_core.ports.engine import ChunkJob
from seer_remote.connection import Connection, Malformed, RefusedCall, Unreachable
from seer_remote.dialect import (
    TEXT,
    AnyCount,
    Count,
    ServerChunk,
    ServerFacts,
    ServerLoad,
    plain_sampling,
    read,
    served_model,
    unread,
    with_attachments,
)
from seer_remote.fields import SGLANG, SGLANG_SAMPLING, divided

__all__ = ["CONTROLS", "Sglang"]

CONTROLS = (
    "min_p",
    "logit_bias",
    "min_tokens",
    "stop_token_ids",
    "ignore_eos",
    "include_stop_str_in_output",
)
"""What depends on the tokens before a place, and not on where the chunk begins."""

UNSEEDED = "min_p"
"""The control whose requests end a server that heeds seeds: its sampler asserts that there is none."""

WHOLE_CONTROLS = ("stop", "presence_penalty", "frequency_penalty")
"""What counts what a request has written, where a chunk is a request."""

OWN_META = (
    "id",
    "finish_reason",
    "output_token_logprobs",
    "input_token_logprobs",
    "cached_tokens",
    "weight_version",
    "prompt_tokens",
    "completion_tokens",
)
"""The fields of a report that are read, or say what is counted here anyway."""

ALL_TOKENS = 1 << 29
"""A ``top_k`` that cuts nothing.

A server draws in the order of the probabilities for all requests of a step as soon as one of them has a cut,
or no heat, and otherwise in the order of the vocabulary.  Other noise belongs to a token then.  With this
each request asks for the first, so what it draws does not depend on which others run.
"""

NO_TOKEN = 2**31 - 1
"""A token that no vocabulary has: SGLang refuses to report on it by naming the vocabulary's size."""
VOCABULARY = re.compile(r"valid range is \[0, (\d+)\)")
MOST_WAITS = 60.0


class ServerInfo(Struct):
    """Answer of ``/server_info``."""

    version: str
    model_path: str
    max_total_num_tokens: Count
    """The tokens of KV of one group of ranks."""
    page_size: Count = 1
    dp_size: int = 1
    """Replicas of the model behind the server."""
    attn_dp_size: int = 1
    """Groups of ranks of a replica, among which requests are shared out for attention (DP attention)."""
    max_running_requests: AnyCount | None = None
    disable_radix_cache: bool = False
    enable_deterministic_inference: bool = False


class SglangText(Struct):
    """Answer of ``/tokenize``."""

    tokens: list[int]


class SglangLoad(Struct):
    """One of ``/v1/loads``."""

    num_running_reqs: int = 0
    num_waiting_reqs: int = 0
    token_usage: float = 0.0


class SglangLoads(Struct):
    """Answer of ``/v1/loads``."""

    loads: list[SglangLoad]


class Ended(Struct):
    """The reason why a response has ended."""

    type: str
    message: str = ""


class Meta(Struct):
    """The report of a response."""

    id: str
    finish_reason: Ended | None
    output_token_logprobs: list[tuple[float, int, Raw]] = []
    cached_tokens: int = 0
    weight_version: str = ""


class SglangGenerated(Struct):
    """Answer of ``/generate``."""

    meta_info: Meta


class Sglang:
    """A server of SGLang."""

    max_temperature: float | None = None
    names_jobs = False

    def __init__(self, connection: Connection) -> None:
        self.connection = connection
        self._heeds_seeds = False

    async def facts(self) -> ServerFacts:
        """Ask for its arguments, its KV and its vocabulary."""
        ask = self.connection
        if await self._is_paused():  # or else the first request would wait for the pause's end
            raise Unreachable("its owner has paused it")
        info = read(ServerInfo, await ask.get("/server_info", MOST_WAITS), "/server_info")
        model, longest = await served_model(ask)
        groups = max(1, info.dp_size) * max(1, info.attn_dp_size)
        lacks = []
        self._heeds_seeds = info.enable_deterministic_inference
        if not self._heeds_seeds:
            lacks.append("start it with --enable-deterministic-inference: then seeds count")
        return ServerFacts(
            engine=f"SGLang {info.version}",
            model=model.id,
            directory=info.model_path,
            max_model_tokens=longest,
            vocab_size=await self._vocab_size(),
            kv_tokens=groups * info.max_total_num_tokens,
            block_tokens=info.page_size,
            max_running=info.max_running_requests or 0,
            shares_prompts=not info.disable_radix_cache and groups == 1,
            tokens_of_text=await self._tokens_of_text(),
            controls=tuple(
                each for each in CONTROLS + WHOLE_CONTROLS if not (self._heeds_seeds and each == UNSEEDED)
            ),
            whole_controls=WHOLE_CONTROLS,
            divided_attachments=divided(SGLANG, SGLANG_SAMPLING),
            lacks=tuple(lacks),
        )

    async def healthy(self) -> bool:
        """Ask ``/ready``, and ``/ping``, to which a paused server says yes; ``/health`` writes a token."""
        return await self._says_yes("/ready") or await self._says_yes("/ping")

    async def load(self) -> ServerLoad:
        """Ask how busy it is, and whether it is paused; it does not say how much it has written."""
        loads = read(SglangLoads, await self.connection.get("/v1/loads?include=core"), "/v1/loads").loads
        return ServerLoad(
            running=sum(each.num_running_reqs for each in loads),
            waiting=sum(each.num_waiting_reqs for each in loads),
            kv_usage=min(1.0, max((each.token_usage for each in loads), default=0.0)),
            written=None,
            paused=await self._is_paused(),
        )

    async def _is_paused(self) -> bool:
        """Return whether its owner has called ``/pause_generation``: then it is healthy, and not ready."""
        return not await self._says_yes("/ready") and await self._says_yes("/ping")

    async def _says_yes(self, path: str) -> bool:
        try:
            await self.connection.get(path, 5.0)
        except (Unreachable, RefusedCall):
            return False
        return True

    async def write(
        self, name: str, job: ChunkJob, tokens: Sequence[int], most: int, seed: int | None, salt: str
    ) -> ServerChunk:
        """Have a chunk written."""
        how = job.sampling
        given: dict[str, Any] = plain_sampling(job) | {
            "top_k": how.top_k or (ALL_TOKENS if self._heeds_seeds else -1),
            "max_new_tokens": most,
            "min_new_tokens": min(most, max(0, how.min_tokens - len(tokens) + job.context_tokens)),
            "presence_penalty": how.presence_penalty,
            "frequency_penalty": how.frequency_penalty,
        }
        if how.stop:
            given["stop"] = list(how.stop)
        if how.logit_bias:
            given["logit_bias"] = {str(token): bias for token, bias in how.logit_bias.items()}
        if seed is not None:
            given["sampling_seed"] = seed
        body = {
            "rid": name,
            "input_ids": tokens,
            "sampling_params": given,
            "return_logprob": True,
            "extra_key": salt,
        }
        body = with_attachments(body, job.attachments, "extra_key")
        returned = await self.connection.post("/generate", body, None)
        meta = read(SglangGenerated, returned, "a chunk").meta_info
        if meta.id != name:
            raise Malformed(f"it answers request {meta.id!r} where {name!r} was asked for")
        if meta.finish_reason is None:
            raise Malformed("it answers with a part of a response")
        pairs = meta.output_token_logprobs
        return ServerChunk(
            [token for _, token, _ in pairs],
            [logprob for logprob, _, _ in pairs],
            meta.finish_reason.type,
            meta.cached_tokens,
            versions=(meta.weight_version,) if meta.weight_version else (),
            attachments=unread(returned, ("text", "output_ids"), "meta_info", OWN_META)
            if job.attachments
            else {},
        )

    async def end(self, names: Sequence[str]) -> None:
        """Abort requests: their answers come with what they have."""
        await asyncio.gather(*(self.connection.post("/abort_request", {"rid": name}) for name in names))

    async def load_weights(self, directory: str, version: int) -> None:
        """Have it load a checkpoint."""
        # Salts keep old KV from being used; a flush would be refused while other clients' requests run.
        body = {"model_path": directory, "weight_version": str(version), "flush_cache": False}
        await self.connection.post("/update_weights_from_disk", body, None)

    async def _vocab_size(self) -> int:
        body = {
            "input_ids": [1],
            "sampling_params": {"max_new_tokens": 1},
            "return_logprob": True,
            "token_ids_logprob": [NO_TOKEN],
        }
        try:
            await self.connection.post("/generate", body)
        except RefusedCall as error:
            if (found := VOCABULARY.search(error.text)) is not None:
                return int(found[1])
            raise
        raise Malformed("it does not say how large the vocabulary is")

    async def _tokens_of_text(self) -> tuple[int, ...]:
        try:
            answer = await self.connection.post("/tokenize", {"prompt": TEXT, "add_special_tokens": True})
            return tuple(read(SglangText, answer, "/tokenize").tokens)
        except (RefusedCall, Malformed):
            return ()
