"""Recorded lengths of every kind: Seer's own formats, and those of other systems by their content."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path

import msgspec
from seer_cli.output import TRACE
from seer_host.json_files import describe_flaw

from seer_core.errors import ConfigError, InputError
from seer_lab.foreign.formats import FORMATS, Format
from seer_lab.foreign.responses import group_responses
from seer_lab.foreign.slime_dump import GUIDE
from seer_lab.foreign.token_counts import CHARACTERS, estimate, token_counter
from seer_lab.lengths import GroupLengths
from seer_lab.traces import read_lengths

__all__ = ["RecordedLengths", "log_files", "read_recorded"]

SUFFIXES = (".jsonl", ".pt")
"""Of the files of a directory that count."""

EVALUATION = re.compile(r"eval_\d+\.pt$")
"""Names of slime's dumps of evaluations, which are no rollouts."""


class RecordedLengths(msgspec.Struct, frozen=True):
    """The groups of each iteration, and sentences about what was guessed or left out."""

    iterations: list[list[GroupLengths]]
    notes: tuple[str, ...] = ()


def read_recorded(
    path: str | Path, where: Sequence[str] = (), tokenizer: Path | None = None
) -> RecordedLengths:
    """Return the lengths that a file holds, or all files of a directory.

    ``where`` is as for ``read_lengths``.  ``tokenizer`` is the directory of a model, for logs of texts.

    Raises:
        ConfigError: an option does not go with the format, or a library is missing.
        PromptError: see ``read_lengths``.
        InputError: the file of another system is damaged.
    """
    path = Path(path)
    written = log_files(path)
    files = [each for each in written if each == path or not EVALUATION.search(each.name)]
    evaluations = len(written) - len(files)
    found = _format_of(files[0]) if files else None
    if tokenizer is not None and not (found and found.has_text):
        raise ConfigError(f"--tokenizer does not go with {path}, whose lengths are in tokens; leave it out")
    if found is None and files and files[0] != path:
        raise InputError(
            f"{files[0]} is not of a dump that is known here; name a run's directory, or the dump's, as"
            f" {GUIDE} shows"
        )
    if found is None:
        return RecordedLengths(read_lengths(path, where))
    if where:
        raise ConfigError(f"--where does not go with {path}, which is {found.kind}; leave it out")
    notes = [found.note] if found.note else []
    count = estimate if tokenizer is None else token_counter(tokenizer)
    if found.has_text and tokenizer is None:
        notes.append(
            f"lengths are estimated, {CHARACTERS} characters a token; name the model by --tokenizer DIR"
        )
    if evaluations:
        notes.append(f"files of evaluations that are left out: {evaluations:,}")
    responses = [each for file in files for each in found.responses(file, count)]
    finished = [each for each in responses if each.is_finished]
    if not finished:
        raise InputError(f"{path}: nothing to simulate: no response has finished; name another file")
    if left_out := len(responses) - len(finished):
        notes.append(f"responses that did not finish and are left out: {left_out:,} of {len(responses):,}")
    if tool_tokens := sum(each.tool_tokens for each in finished):
        notes.append(f"tokens of tools, which answer at once, as their times are not logged: {tool_tokens:,}")
    return RecordedLengths(group_responses(finished), tuple(notes))


def log_files(path: Path) -> list[Path]:
    """Return the files of a workload that another system may have written.

    Pipes are not among them, as they can be read only once.
    """
    if os.path.isfile(path):  # Path's raises for a name that is too long
        return [path]
    if not os.path.isdir(path) or os.path.lexists(path / TRACE):
        return []
    try:
        return sorted(each for each in path.iterdir() if each.suffix in SUFFIXES)
    except OSError as error:
        raise InputError(f"cannot read {path}: {describe_flaw(error)}; mend its permissions") from error


def _format_of(file: Path) -> Format | None:
    try:
        with file.open("rb") as lines:
            head = next((line for line in lines if line.strip()), b"")
    except OSError as error:
        raise InputError(f"cannot read {file}: {describe_flaw(error)}; mend its permissions") from error
    return next((each for each in FORMATS if each.recognises(head)), None)
