"""What clients send and get: OpenAI's completions, with what vLLM and Seer add."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from seer_core.errors import PromptError, printable
from seer_core.ports import Tokenizer

__all__ = ["CompletionRequest", "choice", "error_body", "parse", "records"]

LONGEST_FAULT = 300
"""Characters of an error that quotes what a client sent."""

NEUTRAL = {"best_of": 1, "echo": False, "frequency_penalty": 0, "presence_penalty": 0}
"""Values of fields of OpenAI's that change nothing; others of them, and of ``IGNORANT``, are refused."""

IGNORANT = ("logit_bias", "stop", "suffix")


class CompletionRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of a request for completions.

    ``return_token_ids`` is vLLM's; ``group``, ``priority`` and ``timeout_s`` are Seer's.  What is absent
    comes from ``[rollout]``, but for ``n``.  Of ``logprobs`` only those of the sampled tokens are known.
    """

    prompt: str | list[Any]
    model: str | None = None
    n: Annotated[int, Meta(ge=1)] = 1
    max_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    logprobs: Annotated[int, Meta(ge=0, le=1)] | None = None
    stream: bool | None = None
    return_token_ids: bool | None = None
    group: str | None = None
    priority: int | None = None
    timeout_s: float | None = None
    user: str | None = None
    best_of: int | None = None
    echo: bool | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    logit_bias: Any = None
    stop: Any = None
    suffix: Any = None


def parse(body: bytes) -> CompletionRequest:
    """Read a request.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    try:
        asked = msgspec.json.decode(body, type=CompletionRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise PromptError(
            printable(f"the body is no request for completions: {error}", LONGEST_FAULT)
        ) from None
    for name in (*NEUTRAL, *IGNORANT):
        value = getattr(asked, name)
        if value is not None and value != NEUTRAL.get(name):
            raise PromptError(f"{name} is not supported; leave it out")
    return asked


def records(asked: CompletionRequest, group: str) -> list[dict[str, Any]]:
    """Return a record for each prompt, as ``Runtime.groups`` takes them; ``group`` names it, or each in turn.

    Raises:
        PromptError: ``prompt`` is neither text nor token ids, nor a list of either.
    """
    prompts: Sequence[Any] = asked.prompt if isinstance(asked.prompt, list) else [asked.prompt]
    if prompts and all(type(each) is int for each in prompts):
        prompts = [prompts]
    if not prompts or not all(isinstance(each, str | list) for each in prompts):
        raise PromptError("prompt must be text, a list of token ids, or a list of either")
    sampling = ("max_tokens", "temperature", "top_p", "top_k", "seed", "timeout_s")
    common: dict[str, Any] = {name: getattr(asked, name) for name in sampling}
    common["n"] = asked.n
    if asked.priority is not None:
        common["labels"] = {"priority": str(asked.priority)}
    return [
        {
            **common,
            "prompt" if isinstance(each, str) else "prompt_token_ids": each,
            "group_id": group if len(prompts) == 1 else f"{group}-{number}",
        }
        for number, each in enumerate(prompts)
    ]


def choice(
    asked: CompletionRequest,
    index: int,
    text: str,
    token_ids: Sequence[int],
    logprobs: Sequence[float],
    finish_reason: str | None,
    tokenizer: Tokenizer | None,
) -> dict[str, Any]:
    """Return one of a response's ``choices``, whole or the next piece of it."""
    found: dict[str, Any] = {"index": index, "text": text, "logprobs": None, "finish_reason": finish_reason}
    if asked.logprobs is not None:
        found["logprobs"] = {
            "tokens": [
                f"token_id:{token}" if tokenizer is None else tokenizer.decode([token]) for token in token_ids
            ],
            "token_logprobs": list(logprobs),
            "top_logprobs": None,
            "text_offset": [],
        }
    if asked.return_token_ids:
        found["token_ids"] = list(token_ids)
    return found


def error_body(message: str, kind: str, code: int) -> dict[str, Any]:
    """Return an error as OpenAI's clients understand it."""
    return {"error": {"message": message, "type": kind, "param": None, "code": code}}
