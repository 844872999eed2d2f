"""The fields of a prompt or of ``[rollout]`` that say how tokens are drawn, and their bounds."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from seer_core.model import StructuredOutputs
from seer_core.plugins.config_types import MOST

__all__ = ["MOST_BIAS", "MOST_PENALTY", "MOST_TOP_K", "MOST_TOP_LOGPROBS", "SamplingChoice"]

MOST_TOP_K = 2**31 - 1
"""The most that engines' 32-bit integers hold."""

MOST_PENALTY = 2.0
"""OpenAI's bound of presence and frequency penalties, both ways."""

MOST_TOP_LOGPROBS = 20
"""The most that OpenAI and vLLM have."""

MOST_BIAS = 100.0
"""OpenAI's bound of a logit's bias, both ways."""

Penalty = Annotated[float, Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Bias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
Token = Annotated[int, Meta(ge=0)]


class SamplingChoice(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The fields of ``Sampling`` as a prompt may give them, each on its own.

    An absent field has the value of ``[rollout]``.
    """

    temperature: Annotated[float, Meta(ge=0, le=MOST)] | None = None
    """The sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Tokens are drawn from the most probable ones whose probabilities add up to this."""
    top_k: Annotated[int, Meta(ge=0, le=MOST_TOP_K)] | None = None
    """Tokens are drawn from so many of the most probable ones; 0 means no limit."""
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    """Tokens are left out that are less probable than this share of the most probable one's probability."""
    repetition_penalty: Annotated[float, Meta(gt=0, le=MOST)] | None = None
    """Tokens that stand in the prompt or the response have their logits divided by this where they are above
    0, and multiplied by it where they are below.
    """
    presence_penalty: Penalty | None = None
    """This is taken from the logits of tokens that stand in the response."""
    frequency_penalty: Penalty | None = None
    """This is taken from the logits of tokens that stand in the response, once for each time."""
    logit_bias: dict[Token, Bias] | None = None
    """What is added to the logits of some tokens, by token id; -100 to 100."""
    allowed_token_ids: tuple[Token, ...] | None = None
    """The tokens that may be written; an empty list allows all."""
    bad_words: tuple[str | tuple[Token, ...], ...] | None = None
    """Words that are not written, as text or as token ids."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the response has: JSON after a schema, a regular expression, a choice or a grammar."""
    min_tokens: Annotated[int, Meta(ge=0)] | None = None
    """So many tokens are written before the response may end by a token or at a stop string."""
    stop: str | tuple[str, ...] | None = None
    """Strings at which a response ends."""
    stop_token_ids: tuple[Token, ...] | None = None
    """Tokens at which a response ends, besides the model's own."""
    ignore_eos: bool | None = None
    """Whether the response goes on after a token that the model's files name as its end."""
    include_stop_str_in_output: bool | None = None
    """Whether the text keeps the stop string or stop token at which it ends; the tokens always have it."""
    top_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """The response has so many of the most probable tokens for each of its tokens, with their log-probs."""
    prompt_logprobs: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """The completion has log-probs of the prompt's tokens, and of so many of the most probable ones."""

    def sampling_over(self, defaults: SamplingChoice) -> dict[str, Any]:
        """Return the fields that are given here, or else in ``defaults``."""
        found = {}
        for name in SamplingChoice.__struct_fields__:
            value = getattr(self, name)
            value = getattr(defaults, name) if value is None else value
            if value is not None:
                found[name] = value
        return found
