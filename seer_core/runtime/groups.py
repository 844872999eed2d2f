"""Groups as the core takes them: which can be rolled out."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable

from seer_core.errors import PromptError, quote
from seer_core.model import MOST_RESPONSES, InstanceInfo, PromptGroup
from seer_core.ports.engine import ModelInfo

__all__ = ["MOST_SEED", "check_groups", "problem_of"]

LONGEST_ID = 200
"""Characters of a group's id, which stands in every output line of its responses."""

MOST_LABELS, LONGEST_LABEL = 16, 200
"""Labels of a group, and characters of each, which stand in the trace."""

MOST_SEED = 2**63 - 1


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
    if (flaw := sampling.flaw(model.vocab_size)) is not None:
        return flaw
    if model.max_temperature is not None and sampling.temperature > model.max_temperature:
        return f"temperature is {sampling.temperature}; this engine takes {model.max_temperature:g} at most"
    for name in sampling.controls:
        if name not in model.controls:
            return f"{name} is not supported by this engine; leave it out"
    if group.attachments and not model.takes_attachments:
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


def check_groups(
    groups: Iterable[PromptGroup],
    model: ModelInfo,
    instances: Iterable[InstanceInfo],
    taken: Collection[str] = (),
) -> None:
    """Check that groups can be rolled out together on these instances, or on any if there are none.

    Raises:
        PromptError: a group does not fit the model or the instances, or its id occurs twice or is ``taken``.
    """
    seen: set[str] = set()
    room = max((info.kv_capacity_tokens for info in instances), default=None)
    for group in groups:
        problem = problem_of(group, model)
        needed = len(group.prompt_token_ids) + group.max_tokens
        if problem is None and (group.id in seen or group.id in taken):
            where = "occurs twice" if group.id in seen else "is that of a group under way"
            problem = f"this id {where}; give each group its own"
        if problem is None and room is not None and needed > room:
            problem = (
                f"prompt and max_tokens make {needed} tokens, the largest instance's KV holds {room};"
                " lower max_tokens or give the engine more KV"
            )
        if problem is not None:
            raise PromptError(f"group {quote(group.id)}: {problem}")
        seen.add(group.id)
