"""Fields of OpenAI's and vLLM's requests that Seer does not have, where they change nothing.

Clients send many of them with their defaults.  With such a value, or null, they are taken; with any other
they are refused, because the answer would not be what was asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from seer_core.errors import PromptError

__all__ = [
    "IGNORED",
    "IN_CHATS",
    "IN_COMPLETIONS",
    "NEUTRAL",
    "FieldError",
    "attached_fields",
    "own_fields",
]

IGNORED = (
    "cache_salt",
    "client_metadata",
    "metadata",
    "prediction",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "session_id",
    "store",
    "stream_interval",
    "user",
)
"""Fields that change no token, with any value."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "ec_transfer_params": ({},),
    "kv_transfer_params": ({},),
    "length_penalty": (1,),
    "logprob_token_ids": ([],),
    "media_io_kwargs": ({},),
    "mm_payload": ("tensors",),
    "mm_processor_kwargs": ({},),
    "moderation": (),
    "repetition_detection": (),
    "return_mm_kwargs": (False,),
    "return_prompt_text": (False,),
    "return_token_offsets": (False,),
    "routed_experts_prompt_start": (0,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "thinking_token_budget": (),
    "truncate_prompt_tokens": (),
    "truncation_side": ("left", "right"),
    "use_beam_search": (False,),
    "vllm_xargs": ({},),
    "watermarking": (),
}
"""Fields of completions and chats, and their values that change nothing."""

IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "parallel_tool_calls": (True, False),
    "prompt_embeds": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
}
"""Further fields of completions."""

IN_CHATS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "audio": (),
    "chat_template": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
    "thinking": (),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Further fields of chats."""

SALT = "cache_salt"
"""One of those that are ignored and have a meaning to servers."""

NO_LIMIT = -1
"""``top_k`` as vLLM's clients turn it off; here that is 0."""

NO_SEED = -1
"""``seed`` as some of vLLM's clients leave it out."""

PROGRAM = "program_id"
"""``trajectory``, as clients of ThunderAgent name it."""


class FieldError(PromptError):
    """A field of a request is not as it must be.

    Remedy: change the field that the message names, or leave it out; the answer has its name as ``param``.
    """

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


def own_fields(
    fields: Mapping[str, Any], further: Mapping[str, tuple[Any, ...]], kept: Collection[str] = ()
) -> dict[str, Any]:
    """Return a request's fields without those that change nothing, but for those that are ``kept``.

    Null is the same as absent.

    Raises:
        FieldError: a field that Seer does not have would change something.
    """
    own: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or (name in IGNORED and name not in kept):
            continue
        neutral = None if name in kept else further.get(name, NEUTRAL.get(name))
        if neutral is None:
            own[name] = value
        elif value not in neutral and _without_nulls(value) not in neutral:
            raise FieldError(f"{name} is not supported; leave it out", name)
    if own.get("top_k") == NO_LIMIT:
        own["top_k"] = 0
    if own.get("seed") == NO_SEED:
        del own["seed"]
    if (program := own.pop(PROGRAM, None)) is not None:
        own.setdefault("trajectory", program)
    return own


def attached_fields(
    fields: dict[str, Any], own: Collection[str], further: Mapping[str, tuple[Any, ...]]
) -> dict[str, Any]:
    """Take the fields out of a request that are not Seer's ``own`` and change something; return them."""
    found: dict[str, Any] = {}
    for name, value in list(fields.items()):
        neutral = further.get(name, NEUTRAL.get(name, ()))
        if name in own or name == PROGRAM or (name in IGNORED and name != SALT):
            continue
        if value is not None and value not in neutral and _without_nulls(value) not in neutral:
            found[name] = value
        del fields[name]
    return found


def _without_nulls(value: Any) -> Any:
    """Return a value whose fields are those that are given."""
    return (
        {key: each for key, each in value.items() if each is not None} if isinstance(value, dict) else value
    )
