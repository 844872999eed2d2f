"""Prompts: JSON lines in, prompt groups out, every bad line named."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from seer_core.config import RolloutTable, explain, nearest
from seer_core.errors import ConfigError, PromptError
from seer_core.model import PromptGroup, Sampling
from seer_core.ports import ModelInfo, Tokenizer

__all__ = ["BadPrompt", "PromptRecord", "PromptsFile", "make_groups", "problem_of", "read_prompts"]


class PromptRecord(Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a prompts file: exactly one of ``prompt``, ``prompt_token_ids``, ``messages``.

    What is absent comes from ``[rollout]``; without ``seed`` one is derived from the run's seed and
    the group id, without ``group_id`` the line number names the group.
    """

    prompt: str | None = None
    prompt_token_ids: tuple[int, ...] | None = None
    messages: tuple[dict[str, Any], ...] | None = None
    group_id: str | None = None
    n: Annotated[int, Meta(ge=1)] | None = None
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(ge=0)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=0)] | None = None
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] | None = None
    metadata: dict[str, Any] = {}


class BadPrompt(Struct, frozen=True):
    """A line that cannot be rolled out, and why."""

    line: int
    reason: str


class PromptsFile(Struct, frozen=True):
    """What a prompts file holds: groups to roll out, and the lines left out."""

    groups: list[PromptGroup]
    skipped: list[BadPrompt]


def read_prompts(
    path: str | Path,
    defaults: RolloutTable,
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    *,
    seed: int = 0,
    skip_bad: bool = False,
) -> PromptsFile:
    """Read a prompts file; with ``skip_bad`` bad lines are listed instead of raised.

    Raises:
        PromptError: the file cannot be read, is empty, or holds bad lines.
        ConfigError: the default ``max_tokens`` is beyond the model's length.
    """
    try:
        lines = Path(path).read_bytes().split(b"\n")
    except OSError as error:
        raise PromptError(
            f"cannot read {path}: {error.strerror}; name an existing JSON-lines file"
        ) from error
    groups: list[PromptGroup] = []
    skipped: list[BadPrompt] = []
    seen: dict[str, int] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            group = _group(_decode(line), str(number), defaults, model, tokenizer, seed)
            if group.id in seen:
                raise PromptError(f"group_id {group.id!r} is already used in line {seen[group.id]}")
        except PromptError as error:
            skipped.append(BadPrompt(number, str(error)))
        else:
            seen[group.id] = number
            groups.append(group)
    if skipped and not skip_bad:
        shown = "\n".join(f"{path}:{bad.line}: {bad.reason}" for bad in skipped[:10])
        more = f"\n... and {len(skipped) - 10} more" if len(skipped) > 10 else ""
        raise PromptError(f"{shown}{more}\nMend them, or leave them out with --skip-bad")
    if not groups:
        fact = (
            f"all {len(skipped)} lines are bad, the first: {skipped[0].reason}"
            if skipped
            else "it holds no line"
        )
        raise PromptError(f"{path}: nothing to roll out: {fact}")
    return PromptsFile(groups, skipped)


def make_groups(
    records: Iterable[Mapping[str, Any]],
    defaults: RolloutTable,
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    *,
    seed: int = 0,
) -> list[PromptGroup]:
    """Build groups from mappings with the fields of ``PromptRecord``; group ids default to 1, 2, ...

    Raises:
        PromptError: a record cannot be rolled out.
    """
    groups = []
    for number, record in enumerate(records, 1):
        try:
            fields = msgspec.convert(record, PromptRecord)
            groups.append(_group(fields, str(number), defaults, model, tokenizer, seed))
        except msgspec.ValidationError as error:
            raise PromptError(f"prompt {number}: {_unfit(error)}") from error
        except PromptError as error:
            raise PromptError(f"prompt {number}: {error}") from error
    return groups


def problem_of(group: PromptGroup, model: ModelInfo) -> str | None:
    """Say why a group cannot be rolled out with this model; None if it can."""
    ids = group.prompt_token_ids
    if group.n < 1 or group.max_tokens < 1:
        return f"n is {group.n} and max_tokens is {group.max_tokens}; both must be at least 1"
    if not ids:
        return "the prompt is empty"
    if min(ids) < 0 or max(ids) >= model.vocab_size:
        bad = next(token for token in ids if not 0 <= token < model.vocab_size)
        return f"token id {bad} is outside the vocabulary, 0 to {model.vocab_size - 1}"
    if len(ids) >= model.max_model_tokens:
        return f"the prompt has {len(ids)} tokens, the model takes {model.max_model_tokens} with the response"
    if len(ids) + group.max_tokens > model.max_model_tokens:
        return (
            f"prompt ({len(ids)}) and max_tokens ({group.max_tokens}) exceed the model's"
            f" {model.max_model_tokens} tokens; lower max_tokens to {model.max_model_tokens - len(ids)}"
        )
    return None


def _decode(line: bytes) -> PromptRecord:
    try:
        return msgspec.json.decode(line.decode("utf-8"), type=PromptRecord)
    except UnicodeDecodeError as error:
        raise PromptError(f"not UTF-8 at byte {error.start}") from error
    except msgspec.ValidationError as error:
        raise PromptError(_unfit(error)) from error
    except (msgspec.DecodeError, RecursionError) as error:
        raise PromptError(f"not valid JSON: {error}") from error


def _unfit(error: msgspec.ValidationError) -> str:
    key, fact = explain(error)
    if "unknown field" in fact:
        name = fact.split("`")[1]
        return fact + nearest(name, [field.name for field in msgspec.structs.fields(PromptRecord)])
    return f"{key}: {fact}" if key else fact


def _group(
    record: PromptRecord,
    name: str,
    defaults: RolloutTable,
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    run_seed: int,
) -> PromptGroup:
    def chosen(key: str) -> Any:
        value = getattr(record, key)
        return getattr(defaults, key) if value is None else value

    if record.max_tokens is None and defaults.max_tokens >= model.max_model_tokens:
        raise ConfigError(
            f"[rollout].max_tokens is {defaults.max_tokens}, but the model takes {model.max_model_tokens}"
            " tokens, prompt included; lower it"
        )
    group_id = name if record.group_id is None else record.group_id
    group = PromptGroup(
        id=group_id,
        prompt_token_ids=tuple(_token_ids(record, tokenizer)),
        n=chosen("n"),
        max_tokens=chosen("max_tokens"),
        sampling=Sampling(chosen("temperature"), chosen("top_p"), chosen("top_k")),
        seed=_seed(run_seed, group_id) if record.seed is None else record.seed,
        metadata=record.metadata,
    )
    problem = problem_of(group, model)
    if problem is not None:
        raise PromptError(problem)
    return group


def _token_ids(record: PromptRecord, tokenizer: Tokenizer | None) -> Sequence[int]:
    given = [key for key in ("prompt", "prompt_token_ids", "messages") if getattr(record, key) is not None]
    if len(given) != 1:
        raise PromptError(
            f"give exactly one of prompt, prompt_token_ids and messages; got {' and '.join(given) or 'none'}"
        )
    if record.prompt_token_ids is not None:
        return record.prompt_token_ids
    if tokenizer is None:
        raise PromptError(
            f"this engine has no tokenizer, so {given[0]!r} cannot be read; give prompt_token_ids"
        )
    if record.prompt is not None:
        if not record.prompt.strip():
            raise PromptError("the prompt is empty")
        return tokenizer.encode(record.prompt)
    assert record.messages is not None
    if not record.messages:
        raise PromptError("the prompt is empty: messages holds none")
    try:
        return tokenizer.encode_chat(record.messages)
    except Exception as error:
        raise PromptError(f"the chat template refused the messages: {error}") from error


def _seed(run_seed: int, group_id: str) -> int:
    """Derive a 63-bit seed; changing the run's seed changes every group's."""
    digest = hashlib.blake2b(f"{run_seed}:{group_id}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1
