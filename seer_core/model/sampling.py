"""How tokens are drawn and where a response ends, by the names that vLLM gives to it."""

from __future__ import annotations

import json
import math
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from seer_core.errors import quote

__all__ = ["CONTROLS", "MOST_TOP_K", "MOST_TOP_LOGPROBS", "Sampling", "SamplingChoice", "StructuredOutputs"]

MOST = 1e100
"""Stands for no bound; see ``seer_core.plugins.config_types``."""

MOST_TOP_K = 2**31 - 1
"""The most that engines' 32-bit integers hold."""

MOST_STOPS = 64
"""Stop strings of a prompt, and stop tokens of a prompt."""

LONGEST_STOP = 1000
"""Characters of a stop string: a stream holds back so much of its text."""

MOST_BAD_WORDS = 1000
"""Token sequences of a prompt that are not to be written."""

MOST_PENALTY = 2.0
"""OpenAI's bound of presence and frequency penalties, both ways."""

MOST_TOP_LOGPROBS = 20
"""The most that OpenAI and vLLM have."""

MOST_NESTING = 80
"""Levels of JSON in a schema, or in a tag that holds schemas of calls, as in vLLM; xgrammar's time grows with
them.
"""

MOST_BIAS = 100.0
"""OpenAI's bound of a logit's bias, both ways."""

Penalty = Annotated[float, Meta(ge=-MOST_PENALTY, le=MOST_PENALTY)]
Bias = Annotated[float, Meta(ge=-MOST_BIAS, le=MOST_BIAS)]
Token = Annotated[int, Meta(ge=0)]


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

    @property
    def flaw(self) -> str | None:
        """Why it is none."""
        given = [name for name in self.__struct_fields__ if getattr(self, name) not in (None, False)]
        if len(given) != 1:
            return (
                f"structured_outputs has {' and '.join(given) or 'nothing'}; give one of json, json_object,"
                " regex, choice, grammar and structural_tag"
            )
        if self.choice is not None and not (self.choice and all(self.choice)):
            return "structured_outputs has an empty choice; give texts"
        if any(_is_deep(each) for each in (self.json, self.structural_tag) if each is not None):
            return f"structured_outputs has JSON of more than {MOST_NESTING} levels; flatten it"
        return None


def _is_deep(spec: str | dict[str, Any]) -> bool:
    """Return whether objects and arrays of JSON have too many levels; text that is no JSON has none."""
    try:
        level = [json.loads(spec) if isinstance(spec, str) else spec]
    except RecursionError:
        return True
    except ValueError:
        return False
    for _ in range(MOST_NESTING):
        level = [each for each in level if isinstance(each, dict | list)]
        inner = [each.values() if isinstance(each, dict) else each for each in level]
        level = [each for children in inner for each in children if isinstance(each, dict | list)]
        if not level:
            return False
    return True


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

    def flaw(self, vocab_size: int) -> str | None:
        """Return why no engine can sample so; None if one can."""
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            return f"temperature is {self.temperature}; it must be a number, and at least 0"
        if not 0 < self.top_p <= 1:
            return f"top_p is {self.top_p}; it must be above 0 and at most 1"
        if not 0 <= self.top_k <= MOST_TOP_K:
            return f"top_k is {quote(self.top_k)}; it must be 0 (no limit) to {MOST_TOP_K:,}"
        if not self.controls:
            return None
        if not 0 <= self.min_p <= 1:
            return f"min_p is {self.min_p}; it must be 0 to 1"
        if not 0 < self.repetition_penalty < math.inf:
            return f"repetition_penalty is {self.repetition_penalty}; it must be a number above 0"
        for name in ("presence_penalty", "frequency_penalty"):
            if not abs(getattr(self, name)) <= MOST_PENALTY:
                return f"{name} is {getattr(self, name)}; it must be {-MOST_PENALTY:g} to {MOST_PENALTY:g}"
        if not all(abs(bias) <= MOST_BIAS for bias in self.logit_bias.values()):
            return f"logit_bias goes beyond {-MOST_BIAS:g} to {MOST_BIAS:g}"
        if self.min_tokens < 0:
            return f"min_tokens is {quote(self.min_tokens)}; it must be at least 0"
        most = min(MOST_TOP_LOGPROBS, vocab_size)
        for name in ("top_logprobs", "prompt_logprobs"):
            if not 0 <= (getattr(self, name) or 0) <= most:
                return f"{name} is {quote(getattr(self, name))}; it must be 0 to {most}"
        form = None if self.structured_outputs is None else self.structured_outputs.flaw
        return form or self._flaw_of_tokens(vocab_size) or self._flaw_of_stops()

    def _flaw_of_tokens(self, vocab_size: int) -> str | None:
        named = {
            "logit_bias": self.logit_bias,
            "allowed_token_ids": self.allowed_token_ids,
            "bad_words": [token for word in self.bad_words for token in word],
            "stop_token_ids": self.stop_token_ids,
        }
        for name, tokens in named.items():
            for token in tokens:
                if not 0 <= token < vocab_size:
                    return f"{name} names token {quote(token)}; the vocabulary is 0 to {vocab_size - 1}"
        if not all(self.bad_words):
            return "bad_words has a word without tokens; leave it out"
        if len(self.bad_words) > MOST_BAD_WORDS:
            return f"bad_words are {len(self.bad_words):,} token sequences; they may be {MOST_BAD_WORDS:,}"
        return None

    def _flaw_of_stops(self) -> str | None:
        for name in ("stop", "stop_token_ids"):
            if len(getattr(self, name)) > MOST_STOPS:
                return f"{name} has {len(getattr(self, name)):,} entries; it may have {MOST_STOPS}"
        for each in self.stop:
            if not each:
                return "stop has an empty string; leave it out"
            if len(each) > LONGEST_STOP:
                return f"a stop string has {len(each):,} characters; it may have {LONGEST_STOP:,}"
            if any(0xD800 <= ord(character) < 0xE000 for character in each):
                return "a stop string has half of a character, which no text has; leave it out"
        return None


DEFAULTS = msgspec.structs.asdict(Sampling())
ENDS = ("stop", "stop_token_ids", "ignore_eos", "include_stop_str_in_output")
REPORTS = ("top_logprobs", "prompt_logprobs")
UNSHAPING = (*ENDS, *REPORTS)
"""The fields that decide where a response ends or what is reported of it, and nothing else."""

SHAPING = tuple(name for name in DEFAULTS if name not in UNSHAPING)
"""The fields that change from which distribution tokens are drawn."""

CONTROLS = tuple(name for name in DEFAULTS if name not in ("temperature", "top_p", "top_k"))
"""The fields that not every engine has."""
