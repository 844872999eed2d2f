"""Fields of OpenAI's and vLLM's requests that Seer does not have, where they change nothing.

Clients send many of them with their defaults.  With such a value, or null, they are taken; with any other
they are refused, because the answer would not be what was asked for.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from seer_core.errors import PromptError

__all__ = ["IGNORED", "IN_CHATS", "IN_COMPLETIONS", "NEUTRAL", "FieldError", "own_fields"]

IGNORED = (
    "metadata",
    "prompt_cache_key",
    "prompt_cache_retention",
    "request_id",
    "safety_identifier",
    "service_tier",
    "store",
    "user",
)
"""Fields that change no token, with any value."""

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "detokenize": (True,),
    "length_penalty": (1,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
}
"""Fields of completions and chats, and their values that change nothing."""

IN_COMPLETIONS: dict[str, tuple[Any, ...]] = {
    "add_special_tokens": (True,),
    "best_of": (1,),
    "parallel_tool_calls": (True, False),
    "suffix": ("",),
}
"""Further fields of completions."""

IN_CHATS: dict[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (False,),
    "continue_final_message": (False,),
    "documents": ([],),
    "echo": (False,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "modalities": (["text"],),
    "reasoning_effort": (),
}
"""Further fields of chats."""

NO_LIMIT = -1
"""``top_k`` as vLLM's clients turn it off; here that is 0."""

PROGRAM = "program_id"
"""``trajectory``, as clients of ThunderAgent name it."""


class FieldError(PromptError):
    """A field of a request is not as it must be.

    Remedy: change the field that the message names, or leave it out; the answer has its name as ``param``.
    """

    def __init__(self, message: str, field: str | None) -> None:
        super().__init__(message)
        self.field = field


def own_fields(fields: Mapping[str, Any], further: Mapping[str, tuple[Any, ...]]) -> dict[str, Any]:
    """Return a request's fields without those that change nothing; null is the same as absent.

    Raises:
        FieldError: a field that Seer does not have would change something.
    """
    own: dict[str, Any] = {}
    for name, value in fields.items():
        if value is None or name in IGNORED:
            continue
        neutral = further.get(name, NEUTRAL.get(name))
        if neutral is None:
            own[name] = value
        elif value not in neutral:
            raise FieldError(f"{name} is not supported; leave it out", name)
    if own.get("top_k") == NO_LIMIT:
        own["top_k"] = 0
    if (program := own.pop(PROGRAM, None)) is not None:
        own.setdefault("trajectory", program)
    return own
