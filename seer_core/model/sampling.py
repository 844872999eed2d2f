"""How tokens are drawn and where a response ends, by the names that vLLM gives to it."""

from __future__ import annotations

from typing import Any

import msgspec
from msgspec import Struct

__all__ = [
    "CONTROLS",
    "Sampling",
    "StructuredOutputs",
]


class StructuredOutputs(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """The form that a response has; one of these."""

    json: str | dict[str, Any] | None = None
    """JSON after this schema."""
    json_object: bool | None = None
    """Whether it is any object of JSON."""
    regex: str | None = None
    """Text that this regular expression matches as a whole."""
    choice: tuple[str, ...] | None = None
    """One of these texts."""
    grammar: str | None = None
    """Text of this grammar, in the EBNF of xgrammar, whose rule ``root`` is the whole."""
    structural_tag: str | None = None
    """Text after this structural tag of xgrammar's, as JSON: free text beside parts of a form, such as calls
    of tools.
    """


class Sampling(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """How tokens are drawn, and where a response ends besides its limit and the model's own end."""

    temperature: float = 1.0
    """The sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Tokens are drawn from the most probable ones whose probabilities add up to this."""
    top_k: int = 0
    """Tokens are drawn from so many of the most probable ones; 0 means no limit."""
    min_p: float = 0.0
    """Tokens are left out that are less probable than this share of the most probable one's probability."""
    repetition_penalty: float = 1.0
    """Logits of tokens in the prompt or the response are divided by this above 0, multiplied below."""
    presence_penalty: float = 0.0
    """This is taken from the logits of tokens that stand in the response."""
    frequency_penalty: float = 0.0
    """This is taken from the logits of tokens that stand in the response, once for each time."""
    logit_bias: dict[int, float] = {}
    """What is added to the logits of some tokens, by token id."""
    allowed_token_ids: tuple[int, ...] = ()
    """The tokens that may be written; none named allows all."""
    bad_words: tuple[tuple[int, ...], ...] = ()
    """Sequences of tokens that are not written."""
    structured_outputs: StructuredOutputs | None = None
    """The form that the response has."""
    min_tokens: int = 0
    """So many tokens are written before the response may end by a token or at a stop string."""
    stop: tuple[str, ...] = ()
    """Strings at which the response ends."""
    stop_token_ids: tuple[int, ...] = ()
    """Tokens at which the response ends, besides the model's own."""
    ignore_eos: bool = False
    """Whether the response goes on after a token that the model's files name as its end."""
    include_stop_str_in_output: bool = False
    """Whether the text keeps the stop string or stop token at which it ends; the tokens always have it."""
    top_logprobs: int = 0
    """The response has so many of the most probable tokens for each of its tokens, with their log-probs."""
    prompt_logprobs: int | None = None
    """The completion has log-probs of the prompt's tokens, and of so many of the most probable ones."""

    @classmethod
    def of(cls, temperature: float, top_p: float, top_k: int) -> Sampling:
        """Return the sampling of a framework in which a negative ``top_k`` means no limit."""
        return cls(temperature, top_p, max(top_k, 0))

    @property
    def raw(self) -> bool:
        """Whether tokens are drawn from the model's own distribution, of which log-probs are reported."""
        return (self.temperature, self.top_p, self.top_k) == (1.0, 1.0, 0) and not self.changes_logits

    @property
    def changes_logits(self) -> bool:
        """Whether logits are changed before a token is drawn from them by temperature, top-k and top-p."""
        return bool(
            self.min_p
            or self.repetition_penalty != 1.0
            or self.presence_penalty
            or self.frequency_penalty
            or self.logit_bias
            or self.allowed_token_ids
            or self.bad_words
            or self.structured_outputs
            or self.min_tokens
        )

    @property
    def controls(self) -> tuple[str, ...]:
        """The names of the fields beyond temperature, top-p and top-k that change something."""
        ends = self.stop or self.stop_token_ids
        return tuple(
            name
            for name in CONTROLS
            if getattr(self, name) != DEFAULTS[name] and (name != "include_stop_str_in_output" or ends)
        )

    @property
    def described(self) -> str:
        """The fields, in words, that set it apart from the model's own distribution."""
        shaping = [f"{name} {getattr(self, name)}" for name in self.fields if name in SHAPING]
        return ", ".join(shaping)

    @property
    def fields(self) -> dict[str, Any]:
        """The fields of a prompt's record that change something, and the three that all samplings have."""
        names = ("temperature", "top_p", "top_k", *self.controls)
        return {name: getattr(self, name) for name in names}


DEFAULTS = msgspec.structs.asdict(Sampling())
ENDS = ("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
REPORTS = ("top_logprobs", "prompt_logprobs")
UNSHAPING = (*ENDS, *REPORTS)
"""The fields that decide where a response ends or what is reported of it, and nothing else."""

SHAPING = tuple(name for name in DEFAULTS if name not in UNSHAPING)
"""The fields that change from which distribution tokens are drawn."""

CONTROLS = tuple(name for name in DEFAULTS if name not in ("temperature", "top_p", "top_k"))
"""The fields that not every engine has."""
