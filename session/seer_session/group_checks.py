"""Which prompt groups can be rolled out: what their fields may be, and what a model and its engines take."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from seer_host.images import IMAGES, PlacedImages
from seer_host.sampling_fields import MOST_BIAS, MOST_PENALTY, MOST_TOP_K, MOST_TOP_LOGPROBS

from seer_core.errors import PromptError, quote
from seer_core.model import MOST_RESPONSES, InstanceInfo, PromptGroup, Sampling, StructuredOutputs
from seer_core.ports.engine import ModelInfo

__all__ = ["MOST_SEED", "check_groups", "flaw_of_form", "problem_of", "undivided_attachments"]

LONGEST_ID = 200
"""Characters of a group's id, which stands in every output line of its responses."""

MOST_LABELS, LONGEST_LABEL = 16, 200
"""Labels of a group, and characters of each, which stand in the trace."""

MOST_SEED = 2**63 - 1

MOST_STOPS = 64
"""Stop strings of a prompt, and stop tokens of a prompt."""

LONGEST_STOP = 1000
"""Characters of a stop string: a stream holds back so much of its text."""

MOST_BAD_WORDS = 1000
"""Token sequences of a prompt that are not to be written."""

MOST_NESTING = 80
"""Levels of JSON in a schema, or in a tag that holds schemas of calls, as in vLLM; xgrammar's time grows with
them.
"""


def problem_of(group: PromptGroup, model: ModelInfo) -> str | None:
    """Return the reason why a group cannot be rolled out with this model; None if it can."""
    ids, sampling = group.prompt_token_ids, group.sampling
    if not group.id:
        return "group_id is empty; leave it out, or name the group"
    if len(group.id) > LONGEST_ID:
        return f"group_id has {len(group.id):,} characters; it may have {LONGEST_ID}"
    if not group.id.isprintable():
        return f"group_id {quote(group.id)} holds a character that cannot be printed; take it out"
    if group.trajectories and len(group.trajectories) != group.n:
        return (
            f"it names {len(group.trajectories):,} trajectories; name one for each of {group.n:,} responses"
        )
    for name in (group.family, *group.trajectories):
        if len(name) > LONGEST_ID or not name.isprintable():
            return (
                f"the name {quote(name)} of a trajectory or a family cannot be one; it may have {LONGEST_ID}"
                " characters that can be printed"
            )
    if group.n < 1 or group.max_tokens < 1:
        return f"n is {quote(group.n)} and max_tokens is {quote(group.max_tokens)}; both must be at least 1"
    if group.n > MOST_RESPONSES:
        return f"n is {quote(group.n)}; a group may have {MOST_RESPONSES:,} responses"
    if (flaw := flaw_of_sampling(sampling, model.vocab_size)) is not None:
        return flaw
    if model.max_temperature is not None and sampling.temperature > model.max_temperature:
        return f"temperature is {sampling.temperature}; this engine takes {model.max_temperature:g} at most"
    for name in sampling.controls:
        if name not in model.controls:
            return f"{name} is not supported by this engine; leave it out"
    placed = isinstance(group.attachments, PlacedImages)
    if placed and not model.takes_images:
        return "this engine takes no images with this model; leave them out"
    if group.attachments and not placed and model.divided_attachments is None:
        return "attachments are not supported by this engine; leave them out"
    if sampling.min_tokens > group.max_tokens:
        return (
            f"min_tokens is {quote(sampling.min_tokens)}, max_tokens {quote(group.max_tokens)}; lower"
            " min_tokens"
        )
    if group.timeout_s is not None and not 0 < group.timeout_s < math.inf:
        return f"timeout_s is {group.timeout_s}; it must be a number above 0"
    if group.seeds and len(group.seeds) != group.n:
        return f"it gives {len(group.seeds):,} seeds; give one for each of {group.n:,} responses"
    for seed in (group.seed, *group.seeds):
        if not 0 <= seed <= MOST_SEED:
            return f"seed is {quote(seed)}; it must be 0 to 2^63 - 1"
    if len(group.labels) > MOST_LABELS:
        return f"it has {len(group.labels)} labels; it may have {MOST_LABELS}"
    for name, value in group.labels.items():
        if max(len(name), len(value)) > LONGEST_LABEL:
            return f"label {quote(name)} is too long; name and value may have {LONGEST_LABEL} characters each"
    if not ids:
        return "the prompt is empty"
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        bad = next(token for token in ids if not 0 <= token < model.vocab_size)
        return f"token id {quote(bad)} is outside the vocabulary, 0 to {model.vocab_size - 1}"
    if len(ids) >= model.max_model_tokens:
        return f"the prompt has {len(ids)} tokens, the model takes {model.max_model_tokens} with the response"
    if len(ids) + group.max_tokens > model.max_model_tokens:
        return (
            f"prompt ({len(ids)}) and max_tokens ({quote(group.max_tokens)}) exceed the model's"
            f" {model.max_model_tokens} tokens; lower max_tokens to {model.max_model_tokens - len(ids)}"
        )
    return None


def check_groups(groups: Iterable[PromptGroup], model: ModelInfo, instances: Iterable[InstanceInfo]) -> None:
    """Check that each group can be rolled out on one of these instances, or on any if there are none.

    Raises:
        PromptError: a group does not fit the model or the instances.
    """
    room = max((info.kv_capacity_tokens for info in instances), default=None)
    for group in groups:
        problem = problem_of(group, model)
        needed = len(group.prompt_token_ids) + group.max_tokens
        if problem is None and room is not None and needed > room:
            problem = (
                f"prompt and max_tokens make {needed} tokens, the largest instance's KV holds {room};"
                " lower max_tokens or give the engine more KV"
            )
        if problem is not None:
            raise PromptError(f"group {quote(group.id)}: {problem}")


def undivided_attachments(attachments: Mapping[str, Any], model: ModelInfo) -> list[str]:
    """Return the names in a prompt's attachments under which its responses are not divided."""
    divided = {*(model.divided_attachments or ()), *((IMAGES,) if model.takes_images else ())}
    return sorted(_undivided(attachments, divided))


def _undivided(attachments: Mapping[str, Any], divided: set[str], table: str = "") -> Iterator[str]:
    for name, value in attachments.items():
        path = f"{table}{name}"
        if path in divided:
            continue
        if isinstance(value, Mapping) and any(each.startswith(f"{path}.") for each in divided):
            yield from _undivided(value, divided, f"{path}.")
        else:
            yield path


def flaw_of_sampling(sampling: Sampling, vocab_size: int) -> str | None:
    """Return why no engine can sample so; None if one can."""
    if not (math.isfinite(sampling.temperature) and sampling.temperature >= 0):
        return f"temperature is {sampling.temperature}; it must be a number, and at least 0"
    if not 0 < sampling.top_p <= 1:
        return f"top_p is {sampling.top_p}; it must be above 0 and at most 1"
    if not 0 <= sampling.top_k <= MOST_TOP_K:
        return f"top_k is {quote(sampling.top_k)}; it must be 0 (no limit) to {MOST_TOP_K:,}"
    if not sampling.controls:
        return None
    if not 0 <= sampling.min_p <= 1:
        return f"min_p is {sampling.min_p}; it must be 0 to 1"
    if not 0 < sampling.repetition_penalty < math.inf:
        return f"repetition_penalty is {sampling.repetition_penalty}; it must be a number above 0"
    for name in ("presence_penalty", "frequency_penalty"):
        if not abs(getattr(sampling, name)) <= MOST_PENALTY:
            return f"{name} is {getattr(sampling, name)}; it must be {-MOST_PENALTY:g} to {MOST_PENALTY:g}"
    if not all(abs(bias) <= MOST_BIAS for bias in sampling.logit_bias.values()):
        return f"logit_bias goes beyond {-MOST_BIAS:g} to {MOST_BIAS:g}"
    if sampling.min_tokens < 0:
        return f"min_tokens is {quote(sampling.min_tokens)}; it must be at least 0"
    most = min(MOST_TOP_LOGPROBS, vocab_size)
    for name in ("top_logprobs", "prompt_logprobs"):
        if not 0 <= (getattr(sampling, name) or 0) <= most:
            return f"{name} is {quote(getattr(sampling, name))}; it must be 0 to {most}"
    form = None if sampling.structured_outputs is None else flaw_of_form(sampling.structured_outputs)
    return form or _flaw_of_tokens(sampling, vocab_size) or _flaw_of_stops(sampling)


def _flaw_of_tokens(sampling: Sampling, vocab_size: int) -> str | None:
    named = {
        "logit_bias": sampling.logit_bias,
        "allowed_token_ids": sampling.allowed_token_ids,
        "bad_words": [token for word in sampling.bad_words for token in word],
        "stop_token_ids": sampling.stop_token_ids,
    }
    for name, tokens in named.items():
        for token in tokens:
            if not 0 <= token < vocab_size:
                return f"{name} names token {quote(token)}; the vocabulary is 0 to {vocab_size - 1}"
    if not all(sampling.bad_words):
        return "bad_words has a word without tokens; leave it out"
    if len(sampling.bad_words) > MOST_BAD_WORDS:
        return f"bad_words are {len(sampling.bad_words):,} token sequences; they may be {MOST_BAD_WORDS:,}"
    return None


def _flaw_of_stops(sampling: Sampling) -> str | None:
    for name in ("stop", "stop_token_ids"):
        if len(getattr(sampling, name)) > MOST_STOPS:
            return f"{name} has {len(getattr(sampling, name)):,} entries; it may have {MOST_STOPS}"
    for each in sampling.stop:
        if not each:
            return "stop has an empty string; leave it out"
        if len(each) > LONGEST_STOP:
            return f"a stop string has {len(each):,} characters; it may have {LONGEST_STOP:,}"
        if any(0xD800 <= ord(character) < 0xE000 for character in each):
            return "a stop string has half of a character, which no text has; leave it out"
    return None


def flaw_of_form(form: StructuredOutputs) -> str | None:
    """Return why a form is none; None if it is one."""
    given = [name for name in form.__struct_fields__ if getattr(form, name) not in (None, False)]
    if len(given) != 1:
        return (
            f"structured_outputs has {' and '.join(given) or 'nothing'}; give one of json, json_object,"
            " regex, choice, grammar and structural_tag"
        )
    if form.choice is not None and not (form.choice and all(form.choice)):
        return "structured_outputs has an empty choice; give texts"
    if any(_is_deep(each) for each in (form.json, form.structural_tag) if each is not None):
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
