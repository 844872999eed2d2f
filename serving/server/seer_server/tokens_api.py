"""Tokens in, tokens out: requests and answers of vLLM's ``/inference/v1/generate``."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import repeat
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta
from seer_host.sampling_fields import MOST_TOP_LOGPROBS, SamplingChoice

from seer_core.model import MOST_RESPONSES
from seer_core.model.arrays import LEAST_LOGPROB
from seer_core.ports.engine import Tokenizer
from seer_server.answers import Answer, Part
from seer_server.protocol import CompletionRequest, StreamOptions, convert
from seer_server.unsupported_fields import attached_fields, own_fields

__all__ = ["TokensAnswer", "TokensRequest", "TokensSampling", "parse_tokens"]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "content_parts": ([],),
    "echo": (False,),
    "features": (),
    "reasoning_ended": (),
    "reasoning_parser_kwargs": (),
    "token_offsets": (),
}
"""Further fields of a request, and their values that change nothing."""

NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "flat_logprobs": (False, True),
    "output_kind": (0, 1, 2),
    "extra_args": ({},),
    "prompt_logprob_token_ids": (),
    "skip_clone": (False, True),
    "skip_reading_prefix_cache": (False,),
    "top_logprobs": (0,),
}
"""Further fields of sampling parameters, and their values that change nothing."""


OF_TEXT = dict.fromkeys(("detokenize", "skip_special_tokens", "spaces_between_special_tokens"), (False, True))
"""Fields of sampling parameters that change the text, where there is none."""


class TokensSampling(SamplingChoice, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters, by vLLM's names."""

    n: Annotated[int, Meta(ge=1, le=MOST_RESPONSES)] = 1
    """How many responses are wanted."""
    max_tokens: int | None = None
    """The most tokens of each response."""
    seed: int | None = None
    """The group's seed. In front of servers the responses have this, the next, and so on, as at vLLM's."""
    logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Log-probs of the sampled tokens, and from 2 on of the most probable ones in the place of each, so many
    with the sampled one.
    """
    top_logprobs: Annotated[int, Meta(ge=0, le=0)] | None = None
    """0, or absent: ``logprobs`` says how many."""


class TokensRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /inference/v1/generate``."""

    token_ids: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=1)]
    """The tokens of the prompt."""
    sampling_params: TokensSampling = TokensSampling()
    """How tokens are drawn, and where responses end."""
    model: str | None = None
    """The name of the model that is served; it may be left out."""
    output_mode: Literal["tokens", "text"] = "tokens"
    """With ``text`` the answer has the text beside the tokens, and log-probs have the words."""
    return_token_ids: bool | None = None
    """Whether the answer has the prompt's tokens as well."""
    stream: bool | None = None
    """Whether the tokens are sent as server-sent events while they are written."""
    stream_options: StreamOptions | None = None
    """Options of the stream."""
    group: str | None = None
    """The id of the group, a field of Seer's. The header ``X-Seer-Group`` gives it where this is absent."""
    trajectory: str | None = None
    """The id of the trajectory of which the request is a turn, as in completions."""
    priority: int | None = None
    """The group's label ``priority``, which strategies see. The header ``X-Seer-Priority`` gives it where
    this is absent.
    """
    timeout_s: float | None = None
    """Responses that are not over so long after their submission are aborted; a field of Seer's."""
    family: str | None = None
    """The family of the request, as in completions."""
    request_id: str | None = None
    """The id by which the request can be aborted, and that the answer has."""
    attachments: dict[str, Any] | None = None
    """Further fields that go to servers unread, as in completions. In front of vLLM's servers all fields that
    Seer does not have count as such, also those of ``sampling_params``: images, adapters, and so on.
    """

    def completion(self) -> CompletionRequest:
        """Return the same request as one for completions."""
        names = "model stream stream_options group trajectory priority timeout_s family attachments"
        fields = {name: getattr(self, name) for name in names.split()}
        sampling = {name: getattr(self.sampling_params, name) for name in TokensSampling.__struct_fields__}
        if sampling["logprobs"] is not None:
            sampling["top_logprobs"] = sampling["logprobs"] if sampling["logprobs"] > 1 else 0
        return CompletionRequest(prompt=self.token_ids, **fields, **sampling)


def parse_tokens(body: bytes, *, attaches: bool = False) -> TokensRequest:
    """Read a request; where it ``attaches``, fields that Seer does not have become attachments.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    return convert(body, TokensRequest, "tokens", _attaching if attaches else _own)


def _attaching(fields: dict[str, Any]) -> dict[str, Any]:
    found = attached_fields(fields, TokensRequest.__struct_fields__, NEUTRAL)
    if isinstance(sampling := fields.get("sampling_params"), dict):
        inner = attached_fields(sampling, TokensSampling.__struct_fields__, NEUTRAL_SAMPLING | OF_TEXT)
        if inner:
            found["sampling_params"] = inner
    own = _own(fields)
    if found:
        own["attachments"] = found | (own.get("attachments") or {})
    return own


def _own(fields: dict[str, Any]) -> dict[str, Any]:
    own = own_fields(fields, NEUTRAL, ("request_id",))
    if isinstance(own.get("sampling_params"), dict):
        further = NEUTRAL_SAMPLING if own.get("output_mode") == "text" else NEUTRAL_SAMPLING | OF_TEXT
        own["sampling_params"] = own_fields(own["sampling_params"], further)
    return own


class TokensAnswer(Answer):
    """Writes the answer to one request in vLLM's form."""

    def __init__(self, asked: TokensRequest, model: str, tokenizer: Tokenizer | None) -> None:
        completion = asked.completion()
        super().__init__(completion, model, tokenizer)
        self._tokens = asked
        self.own_id = asked.request_id
        self.id = f"generate-tokens-{asked.request_id or self.id.partition('-')[2]}"
        self._model = model

    @property
    def names(self) -> dict[str, str]:
        """The request's own names."""
        return {"group_id": "request_id" if self._tokens.group is None else "group"}

    def whole(self, parts: Sequence[Part], numbers: dict[str, int], weight_version: int) -> dict[str, Any]:
        """Return the body with all responses."""
        more = {"model": self._model, "created": int(time.time()), "usage": numbers}
        return {**self._piece(parts), **more, "weight_version": weight_version}

    def piece(self, part: Part) -> dict[str, Any]:
        """Return the event of a piece."""
        return {**self._piece([part]), **self._usage_so_far(part)}

    def last(self, numbers: dict[str, int]) -> dict[str, Any]:
        """Return the event that has the usage, after all pieces."""
        return {**self._piece([]), "usage": numbers}

    def _piece(self, parts: Sequence[Part]) -> dict[str, Any]:
        body: dict[str, Any] = {
            "request_id": self.id,
            "output_mode": self._tokens.output_mode,
            "choices": [self._tokens_choice(part) for part in parts],
        }
        prompt = parts[0].prompt_token_ids if parts else None
        if self._tokens.return_token_ids and prompt is not None:
            body["prompt_token_ids"] = list(prompt)
        if parts and parts[0].prompt_logprobs is not None:
            body["prompt_logprobs"] = self.prompt_logprobs(parts[0])
        return body

    def _tokens_choice(self, part: Part) -> dict[str, Any]:
        choice: dict[str, Any] = {
            "index": part.index,
            "token_ids": list(part.token_ids),
            "logprobs": None,
            "finish_reason": "abort" if part.finish_reason == "aborted" else part.finish_reason,
            "stop_reason": part.stop_reason,
        }
        text = self._tokens.output_mode == "text"
        if text:
            choice["text"] = part.text
        if self._tokens.sampling_params.logprobs is not None:
            choice["logprobs"] = self.chat_logprobs(part) if text else _logprobs_by_id(part)
        return {**part.attachments, **choice}


def _logprobs_by_id(part: Part) -> dict[str, Any]:
    """Return the log-prob of each token, by its id, and the most probable ones, of which it is the first.

    No rank is computed.
    """
    content = []
    tops = repeat(()) if part.tops is None else part.tops
    for token_id, logprob, top in zip(part.token_ids, part.logprobs, tops, strict=False):
        sampled = (token_id, logprob)
        others = [each for each in top if each[0] != token_id][: max(len(top) - 1, 0)]
        content.append({**_scored(*sampled), "top_logprobs": [_scored(*each) for each in (sampled, *others)]})
    return {"content": content}


def _scored(token_id: int, logprob: float) -> dict[str, Any]:
    """Return a token as vLLM has it; by its name ``token`` clients of earlier versions look for it."""
    found = {"token_id": token_id, "token": f"token_id:{token_id}"}
    return {**found, "logprob": max(logprob, LEAST_LOGPROB), "rank": None}
