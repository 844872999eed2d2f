"""SGLang's ``/generate``: text or tokens in, text, tokens and log-probs out."""

from __future__ import annotations

from collections.abc import Sequence
from secrets import token_hex
from typing import Annotated, Any

import msgspec
from msgspec import Meta
from seer_host.sampling_fields import MOST_TOP_LOGPROBS

from seer_core.model import MOST_RESPONSES, StructuredOutputs
from seer_core.ports.engine import Tokenizer
from seer_server.answers import Answer, Part
from seer_server.http import by_names
from seer_server.protocol import CompletionRequest, convert
from seer_server.unsupported_fields import FieldError, attached_fields, own_fields

__all__ = ["SglangAnswer", "SglangRequest", "SglangSampling", "parse_sglang"]

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "extra_key": (),
    "log_metrics": (True, False),
    "logprob_start_len": (-1,),
    "return_bytes": (False,),
    "return_hidden_states": (False,),
    "return_indexer_topk": (False,),
    "return_routed_experts": (False,),
    "return_text_in_logprobs": (False,),
    "return_sampling_mask": (False,),
    "routing_key": (),
    "token_ids_logprob": (),
}
"""Further fields of a request, and their values that change nothing."""

NEUTRAL_SAMPLING: dict[str, tuple[Any, ...]] = {
    "spaces_between_special_tokens": (False, True),
}
"""Further fields of sampling parameters, and their values that change nothing."""

TEXT_FIELDS = ("skip_special_tokens",)
"""Sampling parameters that other forms of requests do not have."""

MOST_NEW_TOKENS = 128
"""SGLang's default."""

Form = str | None

FORMS = {"json_schema": "json", "regex": "regex", "ebnf": "grammar", "structural_tag": "structural_tag"}
"""SGLang's fields of forms, and Seer's."""

NAMES = {"max_tokens": "max_new_tokens", "min_tokens": "min_new_tokens", "seed": "sampling_seed"}
"""Other fields that have other names here."""


class SglangSampling(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Sampling parameters, by SGLang's names; an absent one has SGLang's default."""

    n: Annotated[int, Meta(ge=1, le=MOST_RESPONSES)] = 1
    """How many responses are wanted for each prompt."""
    max_new_tokens: int = MOST_NEW_TOKENS
    """The most tokens of each response."""
    min_new_tokens: int = 0
    """So many tokens are written before the response may end."""
    temperature: float = 1.0
    """The sampling temperature; 0 is greedy."""
    top_p: float = 1.0
    """Tokens are drawn from the most probable ones whose probabilities add up to this."""
    top_k: int = 0
    """Tokens are drawn from so many of the most probable ones; 0 and -1 mean no limit."""
    min_p: float = 0.0
    """As in completions."""
    repetition_penalty: float = 1.0
    """As in completions."""
    presence_penalty: float = 0.0
    """As in completions."""
    frequency_penalty: float = 0.0
    """As in completions."""
    logit_bias: dict[str, float] | None = None
    """As in completions."""
    stop: str | list[str] | None = None
    """Strings at which a response ends."""
    stop_token_ids: list[int] | None = None
    """Tokens at which a response ends, besides the model's own."""
    ignore_eos: bool = False
    """Whether the response goes on after the model's end token."""
    no_stop_trim: bool = False
    """Whether the text has what ended the response: its stop string, or with special tokens its end token."""
    skip_special_tokens: bool = True
    """Whether the text has no special tokens."""
    sampling_seed: int | None = None
    """The group's seed. In front of servers all responses have it, as at a server of SGLang's."""
    json_schema: Form = None
    """The form of the response: JSON after a schema."""
    regex: Form = None
    """The form: a regular expression."""
    ebnf: Form = None
    """The form: a grammar."""
    structural_tag: Form = None
    """The form: a structural tag."""

    def common(self) -> dict[str, Any]:
        """Return the same as fields of completions.

        Raises:
            FieldError: more than one form is given.
        """
        same = (
            "n temperature top_p top_k min_p repetition_penalty presence_penalty frequency_penalty stop"
            " stop_token_ids ignore_eos"
        )
        found = {name: getattr(self, name) for name in same.split()}
        found |= {"max_tokens": self.max_new_tokens, "min_tokens": self.min_new_tokens}
        found["seed"] = self.sampling_seed
        if self.no_stop_trim:
            found["include_stop_str_in_output"] = True
        if self.logit_bias is not None:
            found["logit_bias"] = self.logit_bias
        if len(self.forms) > 1:
            raise FieldError(f"{' and '.join(self.forms)} are given; give one of them", self.forms[1])
        for name in self.forms:
            form = StructuredOutputs(**{FORMS[name]: getattr(self, name)})
            found["structured_outputs"] = msgspec.to_builtins(form)
        return {name: value for name, value in found.items() if value is not None}

    @property
    def forms(self) -> list[str]:
        """The fields with a form that are given."""
        return [name for name in FORMS if getattr(self, name) is not None]

    @property
    def names(self) -> dict[str, str]:
        """The names that fields of completions have here."""
        forms = {f"structured_outputs.{other}": name for name, other in FORMS.items()}
        for name in self.forms:
            forms["structured_outputs"] = name
        return NAMES | forms


class SglangRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """The body of ``POST /generate``."""

    input_ids: list[Any] | None = None
    """The tokens of the prompt, or a list of prompts."""
    text: str | list[str] | None = None
    """The text of the prompt, or a list of prompts, in place of ``input_ids``."""
    sampling_params: SglangSampling = SglangSampling()
    """How tokens are drawn, and where responses end."""
    rid: str | None = None
    """The id by which the request can be aborted, and that the answer has."""
    return_logprob: bool | None = None
    """Whether the answer has the log-probs of its tokens."""
    top_logprobs_num: Annotated[int, Meta(ge=0, le=MOST_TOP_LOGPROBS)] | None = None
    """Of how many of the most probable tokens in each place there are log-probs as well."""
    stream: bool | None = None
    """Whether all that is written so far is sent again and again as server-sent events."""
    group: str | None = None
    """The id of the group, as in completions."""
    trajectory: str | None = None
    """The trajectory of which the request is a turn, as in completions."""
    family: str | None = None
    """The family of the request, as in completions."""
    priority: int | None = None
    """The group's label ``priority``, as in completions."""
    timeout_s: float | None = None
    """Responses that are not over so long after their submission are aborted; a field of Seer's."""
    attachments: dict[str, Any] | None = None
    """Further fields that go to servers unread. In front of SGLang's servers all fields that Seer does not
    have count as such, also those of ``sampling_params``.
    """

    @property
    def single(self) -> bool:
        """Whether the answer is one object, and not a list."""
        given = self.text if self.input_ids is None else self.input_ids
        many = isinstance(given, list) and not (given and type(given[0]) is int)
        return not many and self.sampling_params.n == 1

    def completion(self) -> CompletionRequest:
        """Return the same request as one for completions.

        Raises:
            FieldError: there is no prompt, or a field is not as it must be.
        """
        if (self.input_ids is None) == (self.text is None):
            raise FieldError("give either input_ids or text", "input_ids")
        names = "stream group trajectory family priority timeout_s attachments"
        fields = {name: getattr(self, name) for name in names.split()}
        fields["prompt"] = self.text if self.input_ids is None else self.input_ids
        if self.return_logprob:
            fields["logprobs"] = fields["top_logprobs"] = self.top_logprobs_num or 0
        try:
            made = fields | self.sampling_params.common()
            return msgspec.convert(made, CompletionRequest, str_keys=True)
        except msgspec.ValidationError as error:
            fault = FieldError(f"sampling_params: {error}", "sampling_params")
            raise by_names(fault, self.sampling_params.names) from None


def parse_sglang(body: bytes, *, attaches: bool = False) -> SglangRequest:
    """Read a request; where it ``attaches``, fields that Seer does not have become attachments.

    Raises:
        PromptError: it is none, or asks for what Seer does not do.
    """
    return convert(body, SglangRequest, "SGLang's generate", _attaching if attaches else _own)


def _attaching(fields: dict[str, Any]) -> dict[str, Any]:
    found = attached_fields(fields, SglangRequest.__struct_fields__, NEUTRAL)
    if isinstance(sampling := fields.get("sampling_params"), dict):
        inner = attached_fields(sampling, SglangSampling.__struct_fields__, NEUTRAL_SAMPLING)
        if inner:
            found["sampling_params"] = inner
    own = _own(fields)
    if found:
        own["attachments"] = found | (own.get("attachments") or {})
    return own


def _own(fields: dict[str, Any]) -> dict[str, Any]:
    own = own_fields(fields, NEUTRAL)
    if isinstance(own.get("sampling_params"), dict):
        own["sampling_params"] = own_fields(own["sampling_params"], NEUTRAL_SAMPLING, TEXT_FIELDS)
    return own


class SglangAnswer(Answer):
    """Writes the answer to one request in SGLang's form."""

    def __init__(self, asked: SglangRequest, model: str, tokenizer: Tokenizer | None) -> None:
        super().__init__(asked.completion(), model, tokenizer)
        self.special_tokens = not asked.sampling_params.skip_special_tokens
        self._form = asked
        self.own_id = asked.rid
        self.id = asked.rid or token_hex(16)
        self._texts: dict[int, str] = {}
        self._tokens: dict[int, list[int]] = {}
        self._pairs: dict[int, list[list[Any]]] = {}
        self._tops: dict[int, list[list[list[Any]]]] = {}
        self._prompt_length: dict[int, int] = {}

    @property
    def names(self) -> dict[str, str]:
        """The request's own names."""
        return self._form.sampling_params.names | {"group_id": "rid" if self._form.group is None else "group"}

    def whole(self, parts: Sequence[Part], numbers: dict[str, int], weight_version: int) -> Any:
        """Return the body with all responses: an object, or a list of them."""
        self.version = weight_version
        found = [self._so_far(part) for part in parts]
        return found[0] if self._form.single else found

    def piece(self, part: Part) -> dict[str, Any]:
        """Return the event of a piece: all that is written so far."""
        found = self._so_far(part)
        return found if self._form.single else {**found, "index": part.index}

    def closing(self, numbers: dict[str, int]) -> list[dict[str, Any]]:
        """Return no event: each has its numbers."""
        return []

    def _so_far(self, part: Part) -> dict[str, Any]:
        index = part.index
        if part.prompt_token_ids is not None:
            self._prompt_length[index] = len(part.prompt_token_ids)
        text = self._texts[index] = self._texts.get(index, "") + part.text
        tokens = self._tokens.setdefault(index, [])
        tokens.extend(part.token_ids)
        meta: dict[str, Any] = {
            **part.attachments,
            "id": self.id,
            "finish_reason": _ended(part, len(tokens)),
            "prompt_tokens": self._prompt_length.get(index, 0),
            "completion_tokens": len(tokens),
            "weight_version": str(self.version),
        }
        if self._form.return_logprob:
            pairs = self._pairs.setdefault(index, [])
            pairs += [
                [score, token, None] for token, score in zip(part.token_ids, part.logprobs, strict=False)
            ]
            meta["input_token_logprobs"], meta["output_token_logprobs"] = [], pairs
            if part.tops is not None:
                tops = self._tops.setdefault(index, [])
                tops += [[[score, token, None] for token, score in place] for place in part.tops]
                meta["output_top_logprobs"] = tops
        return {"text": text, "output_ids": tokens, "meta_info": meta}


def _ended(part: Part, written: int) -> dict[str, Any] | None:
    """Return why a response is over, in SGLang's form; None while it is not."""
    match part.finish_reason:
        case None:
            return None
        case "stop":
            matched = part.stop_reason
            if matched is None and part.token_ids:
                matched = part.token_ids[-1]
            return {"type": "stop", "matched": matched}
        case "length":
            return {"type": "length", "length": written}
        case reason:
            return {"type": "abort", "message": f"the response ended by {reason}"}
