"""Prompts: JSON lines in, prompt groups out; errors name the line."""

from __future__ import annotations

import codecs
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import attrs
import msgspec
from msgspec import Meta, Struct
from seer_host.config_files import RolloutTable
from seer_host.json_files import explain_error
from seer_host.sampling_fields import SamplingChoice
from seer_host.tables import nearest

from seer_core.errors import SHOWN, ConfigError, PromptError, SeerError, printable, quote
from seer_core.model import MOST_RESPONSES, PromptGroup, Sampling
from seer_core.model.requests import group_seed
from seer_core.plugins.config_types import Positive
from seer_core.ports.engine import ModelInfo, Tokenizer
from seer_session.group_checks import MOST_SEED, problem_of
from seer_session.images import ImageReader, image_parts, place_images
from seer_session.long_texts import end_beyond, text_of
from seer_session.rollouts import digest_of_prompt

__all__ = [
    "BadPrompt",
    "PromptRecord",
    "PromptsFile",
    "check_record",
    "make_groups",
    "read_prompts",
]


KINDS = ("prompt", "prompt_token_ids", "messages")


class PromptRecord(SamplingChoice, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """One line of a prompts file: exactly one of ``prompt``, ``prompt_token_ids``, ``messages``.

    Absent fields have the values of ``[rollout]``.
    """

    prompt: str | None = None
    """The prompt as text."""
    prompt_token_ids: tuple[int, ...] | None = None
    """The prompt as token ids."""
    messages: tuple[dict[str, Any], ...] | None = None
    """The prompt as messages of a chat, which the model's template makes one text of."""
    chat_template_kwargs: dict[str, Any] = msgspec.field(default_factory=dict)
    """Variables for the model's template, beside the messages, such as ``enable_thinking`` or ``tools``."""
    group_id: str | None = None
    """The group's id. Without it a digest of the prompt's tokens names the group; of equal prompts in one
    file or open rollout, the second is DIGEST-2, and so on.
    """
    n: Annotated[int, Meta(ge=1, le=MOST_RESPONSES)] | None = None
    """How many responses are wanted."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    """The most tokens of each response, prompt excluded."""
    seed: Annotated[int, Meta(ge=0, le=MOST_SEED)] | None = None
    """The group's seed. Without it one is derived from the run's seed, the iteration and the group's id."""
    seeds: Annotated[tuple[Annotated[int, Meta(ge=0, le=MOST_SEED)], ...], Meta(min_length=1)] | None = None
    """The seed of each response, in place of the group's from which they follow otherwise."""
    metadata: dict[str, Any] = msgspec.field(default_factory=dict)
    """The user's own data, which comes back with each completion."""
    labels: dict[str, str] = msgspec.field(default_factory=dict)
    """Labels that strategies see."""
    timeout_s: Positive | None = None
    """Responses that are not over so long after their submission are aborted."""
    trajectories: tuple[str, ...] | None = None
    """The trajectory of which each response is a turn, where a program of its own asks for turn after turn.
    The KV pool keeps the KV of a trajectory for its next turn.
    """
    family: str | None = None
    """The family of the group. Groups of a family are siblings to each other, as responses of one group are.
    """
    images: tuple[Any, ...] = ()
    """The prompt's images, in the order of their places: each a path or a data URL, in Python bytes too. The
    parts of messages may name images themselves.
    """
    attachments: dict[str, Any] = msgspec.field(default_factory=dict)
    """Further fields for an engine that takes some, such as an adapter; they go to it unread."""


class BadPrompt(Struct, frozen=True):
    """A line that cannot be rolled out."""

    line: int
    """Its number, from 1."""
    reason: str
    """The reason, in words."""


class PromptsFile(Struct, frozen=True):
    """The content of a prompts file: groups to roll out, and the lines left out."""

    groups: list[PromptGroup]
    skipped: list[BadPrompt]


def read_prompts(
    path: str | Path,
    defaults: RolloutTable,
    model: ModelInfo,
    tokenizer: Tokenizer | None,
    *,
    seed: int = 0,
    iteration: int = 0,
    skip_bad: bool = False,
) -> PromptsFile:
    """Read a prompts file; with ``skip_bad`` bad lines are listed instead of raised.

    The same ``seed`` and ``iteration`` give the same sampling seeds; see ``PromptRecord``.

    Raises:
        PromptError: the file cannot be read, is empty, or holds bad lines.
        ConfigError: the default ``max_tokens`` is beyond the model's length.
    """
    try:
        lines = Path(path).read_bytes().removeprefix(codecs.BOM_UTF8).split(b"\n")
    except OSError as error:
        raise PromptError(
            f"cannot read {path}: {error.strerror}; name an existing JSON-lines file"
        ) from error
    groups: list[PromptGroup] = []
    skipped: list[BadPrompt] = []
    seen: dict[str, int] = {}
    reader = ImageReader(defaults.image_roots, Path(path).parent)
    maker = _Maker(defaults, model, tokenizer, seed, iteration, reader)
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            group = maker.group(_decode(line))
            if group.id in seen:
                raise PromptError(f"group_id {quote(group.id)} is already used in line {seen[group.id]}")
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
    iteration: int = 0,
    named: Mapping[str, int] | None = None,
    most_tokens: int | None = None,
) -> list[PromptGroup]:
    """Build groups from mappings with the fields of ``PromptRecord``, as ``read_prompts`` does from lines.

    ``named`` counts the groups before these that were named after each prompt (``Rollout.named``).  Where a
    record has no ``max_tokens``, prompt and response may have ``most_tokens`` together, if that is given.

    Raises:
        PromptError: a record cannot be rolled out.
    """
    groups = []
    reader = ImageReader(defaults.image_roots)
    maker = _Maker(defaults, model, tokenizer, seed, iteration, reader, named or {}, most_tokens)
    for number, record in enumerate(records, 1):
        try:
            groups.append(maker.group(_record_of(record)))
        except PromptError as error:
            raise PromptError(f"prompt {number}: {error}") from error
    return groups


def check_record(record: Mapping[str, Any]) -> None:
    """Check of a prompt what needs neither its model nor its images: its fields, and which go together.

    Raises:
        PromptError: it cannot be rolled out.
    """
    _check_together(_record_of(record))


def _record_of(record: Mapping[str, Any]) -> PromptRecord:
    try:
        return msgspec.convert(record, PromptRecord, str_keys=True)
    except msgspec.ValidationError as error:
        raise PromptError(_unfit(error)) from error


def _check_together(record: PromptRecord) -> None:
    if record.seed is not None and record.seeds is not None:
        raise PromptError("give seed or seeds, and not both")
    given = [key for key in KINDS if getattr(record, key) is not None]
    if len(given) != 1:
        raise PromptError(
            f"give exactly one of prompt, prompt_token_ids and messages; got {' and '.join(given) or 'none'}"
        )
    if record.chat_template_kwargs and record.messages is None:
        raise PromptError("chat_template_kwargs goes with messages; leave it out")
    if record.prompt is not None and not record.prompt.strip():
        raise PromptError("the prompt is empty")
    if record.messages is not None and not record.messages:
        raise PromptError("messages holds none, so the prompt is empty")


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
    key, fact = explain_error(error)
    if "unknown field" in fact:
        name = fact.split("`")[1]
        hint = nearest(name, [field.name for field in msgspec.structs.fields(PromptRecord)])
        return printable(fact, SHOWN) + (hint if len(name) <= SHOWN else "")
    return printable(f"{key}: {fact}" if key else fact, SHOWN)


@attrs.define(eq=False)
class _Maker:
    """Makes the groups of one file or call; ``names`` counts those that are named after each prompt.

    ``earlier`` counts the groups before these in the same way.
    """

    defaults: RolloutTable
    model: ModelInfo
    tokenizer: Tokenizer | None
    seed: int
    iteration: int
    reader: ImageReader
    earlier: Mapping[str, int] = attrs.Factory(dict)
    most_tokens: int | None = None
    names: Counter[str] = attrs.Factory(Counter)
    samplings: list[Sampling] = attrs.Factory(list)
    """The last one, which the next prompt shares if it is the same: there may be a million."""

    def group(self, record: PromptRecord) -> PromptGroup:
        """Raise PromptError where the record cannot be rolled out."""
        fits = self.most_tokens is not None
        if record.max_tokens is None and not fits and self.defaults.max_tokens >= self.model.max_model_tokens:
            raise ConfigError(
                f"[rollout].max_tokens is {self.defaults.max_tokens}, but the model takes"
                f" {self.model.max_model_tokens} tokens, prompt included; lower it"
            )
        _check_together(record)
        token_ids, attachments = self._prompt(record)
        group = PromptGroup(
            id="unnamed" if record.group_id is None else record.group_id,
            prompt_token_ids=token_ids,
            n=self._chosen(record, "n"),
            max_tokens=self._max_tokens(record, len(token_ids)),
            sampling=self._sampling(record),
            metadata=record.metadata,
            labels=record.labels,
            timeout_s=record.timeout_s,
            trajectories=record.trajectories or (),
            family=record.family or "",
            attachments=attachments,
            seeds=record.seeds or (),
        )
        problem = problem_of(group, self.model)
        if problem is not None:
            raise PromptError(problem)
        group_id = self._name(group) if record.group_id is None else record.group_id
        return msgspec.structs.replace(group, id=group_id, seed=self._group_seed(record, group_id))

    def _prompt(self, record: PromptRecord) -> tuple[tuple[int, ...], Mapping[str, Any]]:
        """Return the tokens of a prompt, those of its images among them, and its attachments."""
        messages, parts = image_parts(record.messages or ())
        if parts:
            record = msgspec.structs.replace(record, messages=messages)
        if not (parts or record.images):
            return tuple(_token_ids(record, self.tokenizer, self.model.max_model_tokens)), record.attachments
        if not self.model.takes_images:
            raise PromptError("this engine takes no images with this model; leave them out")
        if record.attachments:
            raise PromptError("give images or attachments, and not both")
        images = self.reader.all(parts, record.images)
        token_ids = _token_ids(record, self.tokenizer, self.model.max_model_tokens)
        placed, attachments = place_images(token_ids, images, self.tokenizer)
        return tuple(placed), attachments

    def _group_seed(self, record: PromptRecord, group_id: str) -> int:
        """Return the group's seed; 0 where it is not read."""
        if record.seeds is not None:
            return 0
        return group_seed(self.seed, self.iteration, group_id) if record.seed is None else record.seed

    def _sampling(self, record: PromptRecord) -> Sampling:
        fields = record.sampling_over(self.defaults)
        if isinstance(stop := fields.get("stop"), str):
            fields["stop"] = (stop,) if stop else ()
        if words := fields.get("bad_words"):
            if "bad_words" not in self.model.controls:
                raise PromptError("bad_words is not supported by this engine; leave it out")
            fields["bad_words"] = _bad_words(words, self.tokenizer)
        found = Sampling(**fields)
        if self.samplings != [found]:
            self.samplings[:] = [found]
        return self.samplings[0]

    def _name(self, group: PromptGroup) -> str:
        """Return 12 hexadecimal digits that depend on the prompt alone, and a number if it recurs."""
        digest = digest_of_prompt(group)
        self.names[digest] += 1
        number = self.earlier.get(digest, 0) + self.names[digest]
        return digest if number == 1 else f"{digest}-{number}"

    def _max_tokens(self, record: PromptRecord, prompt_tokens: int) -> int:
        if record.max_tokens is not None or self.most_tokens is None:
            return int(self._chosen(record, "max_tokens"))
        return max(1, min(self.defaults.max_tokens, self.most_tokens - prompt_tokens))

    def _chosen(self, record: PromptRecord, key: str) -> Any:
        value = getattr(record, key)
        return getattr(self.defaults, key) if value is None else value


def _token_ids(record: PromptRecord, tokenizer: Tokenizer | None, most: int) -> Sequence[int]:
    if record.prompt_token_ids is not None:
        return record.prompt_token_ids
    if tokenizer is None:
        key = "messages" if record.prompt is None else "prompt"
        raise PromptError(f"this engine has no tokenizer, so {key!r} cannot be read; give prompt_token_ids")
    if record.prompt is not None:
        _require_short(record.prompt, tokenizer, most)
        with _naming_refusals("tokenizer refused the prompt"):
            return tokenizer.encode(record.prompt)
    assert record.messages is not None
    _require_short(text_of(record.messages), tokenizer, most)
    with _naming_refusals("chat template refused the messages"):
        if not record.chat_template_kwargs:
            return tokenizer.encode_chat(record.messages)
        return tokenizer.encode_chat(record.messages, record.chat_template_kwargs)


@contextmanager
def _naming_refusals(fact: str) -> Iterator[None]:
    """Turn an error of a tokenizer's or a template's into one of the prompt."""
    try:
        yield
    except SeerError:
        raise
    except Exception as error:
        raise PromptError(f"the {fact}: {printable(str(error), SHOWN)}") from error


def _bad_words(
    words: Iterable[str | tuple[int, ...]], tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], ...]:
    """Return the tokens of words that are not to be written, at a text's beginning and within it.

    As in vLLM, a word has a second form, with a space before it, where that takes as many tokens and begins
    with another one.
    """
    found: list[tuple[int, ...]] = []
    for word in words:
        if not isinstance(word, str):
            found.append(word)
            continue
        if tokenizer is None:
            raise PromptError("this engine has no tokenizer; give bad_words as token ids")
        plain, spaced = (tuple(tokenizer.encode_part(prefix + word.lstrip())) for prefix in ("", " "))
        found.append(plain)
        if spaced and plain and spaced[0] != plain[0] and len(spaced) == len(plain):
            found.append(spaced)
    return tuple(found)


def _require_short(text: str, tokenizer: Tokenizer, most: int) -> None:
    """Raise PromptError for a text of more tokens than the model takes; encode little more than those."""
    if (size := end_beyond(text, tokenizer, most)) is not None:
        raise PromptError(
            f"the prompt has {len(text):,} characters, and the first {size:,} are more than the {most:,}"
            " tokens that the model takes"
        )
