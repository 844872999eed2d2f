"""Recorded lengths: JSON lines of groups or of trajectories, or the trace of a finished ``seer run``."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta
from seer_host.json_files import UNREADABLE, describe_flaw, read_bytes
from seer_trace.records import read_trace

from seer_core.errors import PromptError, quote
from seer_core.model import WHOLE
from seer_core.model.events import (
    AskEnvironment,
    ChunkFinished,
    Complete,
    EnvironmentAnswered,
    GroupSpec,
    GroupsSubmitted,
)
from seer_lab.lengths import GroupLengths, RecordedTurn, Tokens
from seer_lab.trajectories import TRAJECTORY, TrajectoryLine, flaws_of, iterations_of

__all__ = ["read_lengths"]

SHOWN_PROBLEMS = 10

EXAMPLE = 'such as {"group": "a", "prompt_tokens": 300, "output_tokens": [1107, 398]}'


class LengthsLine(msgspec.Struct, frozen=True):
    """One line: a group, its prompt, its responses; other keys are allowed and can be selected by.

    ``max_tokens`` is the limit under which the lengths came about; without it, the file's longest response.
    Groups of one ``iteration`` are rolled out together.
    """

    group: str | int
    prompt_tokens: Tokens
    output_tokens: Annotated[tuple[Tokens, ...], Meta(min_length=1)]
    max_tokens: Tokens | None = None
    iteration: int = 0
    workload: str = ""


Line = TypeVar("Line", LengthsLine, TrajectoryLine)


class LineFormat(msgspec.Struct, Generic[Line], frozen=True):
    """A kind of line: its type, an example, the flaws of several together, and the groups that they make."""

    into: type[Line]
    example: str
    flaws: Callable[[Sequence[tuple[int, Line]]], Iterator[tuple[int, str]]]
    iterations: Callable[[Sequence[Line]], list[list[GroupLengths]]]


def read_lengths(path: str | Path, where: Sequence[str] = ()) -> list[list[GroupLengths]]:
    """Return the groups of each iteration that a file holds; a directory is that of a ``seer run``.

    A file whose first line has ``turns`` holds trajectories.  ``where`` are KEY=VALUE: only lines that say
    so count.

    Raises:
        PromptError: it cannot be read, holds bad lines, no line that counts, or several workloads.
    """
    path = Path(path)
    path = path / "trace.jsonl" if path.is_dir() else path
    remedy = "name a workload, a JSON-lines file, a run's directory or a trainer's dump"
    lines = read_bytes(path, remedy, PromptError).split(b"\n")
    first = next((line for line in lines if line.strip()), b"")
    if b'"event":' in first:
        return [_of_run(path)]
    if _is_trajectory(first):
        return _read_lines(path, lines, where, TRAJECTORIES)
    return _read_lines(path, lines, where, LENGTHS)


def _read_lines(
    path: Path, lines: Sequence[bytes], where: Sequence[str], form: LineFormat[Line]
) -> list[list[GroupLengths]]:
    selected = [_selection(text) for text in where]
    problems: list[str] = []
    found: list[tuple[int, Line]] = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            if all(keep(line) for keep in selected):
                found.append((number, _decode(line, form.into)))
        except PromptError as error:
            problems.append(f"{path}:{number}: {error}")
    if problems and not found:
        raise PromptError(
            f"{problems[0]}\n{path} has no line of lengths; one object a line is needed, {form.example}"
        )
    problems += [f"{path}:{number}: {problem}" for number, problem in form.flaws(found)]
    if problems:
        more = f"\n... and {len(problems) - SHOWN_PROBLEMS} more" if len(problems) > SHOWN_PROBLEMS else ""
        raise PromptError("\n".join(problems[:SHOWN_PROBLEMS]) + more + "\nMend them, then run again")
    if not found:
        why = f"no line says {' and '.join(where)}" if where else "it holds no line"
        raise PromptError(f"{path}: nothing to simulate: {why}")
    workloads = sorted({line.workload for _, line in found})
    if len(workloads) > 1:
        raise PromptError(
            f"{path} holds several workloads: {', '.join(workloads)}; choose one:"
            f" --where workload={workloads[0]}"
        )
    return form.iterations([line for _, line in found])


def _selection(text: str) -> Callable[[bytes], bool]:
    """Return a predicate of lines that have VALUE at KEY, from the text KEY=VALUE."""
    key, equals, value = text.partition("=")
    if not key or not equals:
        raise PromptError(f"--where {quote(text)}: give KEY=VALUE, such as workload=mine or iteration=0")

    def keep(line: bytes) -> bool:
        record = _json(line)
        said = record.get(key) if isinstance(record, dict) else None
        return (said if isinstance(said, str) else msgspec.json.encode(said).decode()) == value

    return keep


def _json(line: bytes) -> Any:
    try:
        return msgspec.json.decode(line)
    except UNREADABLE as error:
        raise PromptError(f"not valid JSON: {describe_flaw(error, line)}") from error


def _is_trajectory(line: bytes) -> bool:
    try:
        record = _json(line)
    except PromptError:
        return False
    return isinstance(record, dict) and "turns" in record and "output_tokens" not in record


def _decode(line: bytes, into: type[Line]) -> Line:
    try:
        return msgspec.convert(_json(line), into)
    except msgspec.ValidationError as error:
        raise PromptError(describe_flaw(error)) from error


def _contradictions(found: Sequence[tuple[int, LengthsLine]]) -> Iterator[tuple[int, str]]:
    """Yield number and problem of lines that are well-formed and cannot be."""
    seen: dict[tuple[str, int, str | int], int] = {}
    for number, line in found:
        name = (line.workload, line.iteration, line.group)
        if name in seen:
            yield (
                number,
                f"group {quote(line.group)} of iteration {line.iteration} is in line {seen[name]} already",
            )
        seen.setdefault(name, number)
        longest = max(line.output_tokens)
        if line.max_tokens is not None and longest > line.max_tokens:
            yield (
                number,
                (
                    f"output_tokens[{line.output_tokens.index(longest)}] is {longest}, above max_tokens ="
                    f" {line.max_tokens}"
                ),
            )


def _iterations(lines: Sequence[LengthsLine]) -> list[list[GroupLengths]]:
    longest = max(max(line.output_tokens) for line in lines)
    iterations: dict[int, list[GroupLengths]] = {}
    for line in lines:
        limit = longest if line.max_tokens is None else line.max_tokens
        group = GroupLengths(str(line.group), line.prompt_tokens, line.output_tokens, limit)
        iterations.setdefault(line.iteration, []).append(group)
    return [iterations[number] for number in sorted(iterations)]


LENGTHS = LineFormat(LengthsLine, EXAMPLE, _contradictions, _iterations)
TRAJECTORIES = LineFormat(TrajectoryLine, TRAJECTORY, flaws_of, iterations_of)


def _of_run(path: Path) -> list[GroupLengths]:
    """Return the groups of a run, by its trace; they have turns if an environment answered any."""
    specs: dict[str, GroupSpec] = {}
    lengths: Counter[str] = Counter()
    turns: defaultdict[str, list[tuple[int, float | None, int]]] = defaultdict(list)
    asked_s: dict[str, float] = {}
    over: dict[str, str] = {}
    for record in read_trace(path):
        match record.event:
            case GroupsSubmitted(groups):
                for spec in groups:
                    if spec.id in specs:
                        raise PromptError(
                            f"{path}: group {quote(spec.id)} was submitted twice, so lengths are mixed;"
                            " use a run that gave each group its own id"
                        )
                    specs[spec.id] = spec
                    lengths.update({f"{spec.id}/{at}": each.tokens for at, each in enumerate(spec.resumed)})
            case ChunkFinished(request_id, _, tokens):
                lengths[request_id] += tokens
            case EnvironmentAnswered(request_id, tokens):
                tool_s = record.now - asked_s.get(request_id, record.now)
                turns[request_id].append((_unanswered(lengths, turns, request_id), tool_s, tokens))
                lengths[request_id] += tokens
        for command in record.commands:
            if isinstance(command, Complete):
                over[command.request_id] = command.finish_reason
            elif isinstance(command, AskEnvironment):
                asked_s[command.request_id] = record.now
    has_turns = bool(turns)
    found = []
    for spec in specs.values():
        trajectories = []
        for index in range(spec.n):  # a damaged file may have any number
            name = f"{spec.id}/{index}"
            if (reason := over.get(name, "unfinished")) not in WHOLE:
                raise PromptError(
                    f"{path}: request {quote(name)} is {reason}, so its length is unknown; use a run"
                    " that finished"
                )
            if has_turns and index < len(spec.resumed) and spec.resumed[index].tokens:
                raise PromptError(
                    f"{path}: request {quote(name)} was begun by an earlier process, so its turns are"
                    " unknown; use a run that was not resumed"
                )
            if rest := _unanswered(lengths, turns, name):
                turns[name].append((rest, None, 0))
            trajectories.append(turns[name])
        fields = {
            "group": spec.id,
            "prompt_tokens": spec.prompt_tokens,
            "output_tokens": [lengths[f"{spec.id}/{index}"] for index in range(spec.n)],
            "max_tokens": spec.max_tokens,
        }
        try:
            line = msgspec.convert(fields, LengthsLine)
            recorded = msgspec.convert(trajectories, tuple[tuple[RecordedTurn, ...], ...])
        except msgspec.ValidationError as error:
            raise PromptError(
                f"{path}: group {quote(spec.id)}: {describe_flaw(error)}; use a run that finished"
            ) from error
        lines = line.prompt_tokens, line.output_tokens, spec.max_tokens
        found.append(GroupLengths(spec.id, *lines, recorded if has_turns else ()))
    if not found:
        raise PromptError(f"{path}: nothing to simulate: no group was submitted")
    return found


def _unanswered(
    lengths: Mapping[str, int], turns: Mapping[str, Sequence[tuple[int, float | None, int]]], request_id: str
) -> int:
    """Return how many tokens a response has behind its last answer."""
    answered = sum(written + answer for written, _, answer in turns.get(request_id, ()))
    return lengths.get(request_id, 0) - answered
