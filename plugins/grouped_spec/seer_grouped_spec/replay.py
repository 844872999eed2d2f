"""Replay recorded responses through the draft index: would speculation pay on this data?

Every response is played back as an engine would have written it: draft, compare with what was really
written, keep what agrees and one token more (the bonus token), and so on.  No model runs.  What an
environment answered is context that is there at once: no step writes it, and no draft counts for it.
"""

from __future__ import annotations

import warnings
import zipfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
import numpy as np
from numpy.typing import NDArray
from seer_host.json_files import UNREADABLE, describe_flaw

from seer_core.errors import SHOWN, SeerError, printable
from seer_grouped_spec._index import DraftIndex, Voting

__all__ = ["Recording", "ReplayError", "ReplayRow", "ResponseSteps", "load", "replay", "replay_steps"]

Tokens = NDArray[np.int32]
Count = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Siblings = int | Literal["live"]

MAX_TOKEN = 2**31 - 1
NO_TOKEN = -1
NO_ANSWERS: Tokens = np.zeros((0, 2), np.int32)
FOREVER_S = float("inf")


class ReplayError(SeerError):
    """A recording cannot be read or replayed as asked.

    Remedy: name a file or an option as the message asks.
    """


class Recording(msgspec.Struct, frozen=True, eq=False):
    """One prompt group: its prompt (may be empty) and its responses, as token ids.

    Where an environment answered, ``answers`` has for each response the first token of each answer, and the
    first behind it, int32 [A, 2].
    """

    group: str
    prompt: Tokens
    responses: tuple[Tokens, ...]
    answers: tuple[Tokens, ...] = ()

    def answers_in(self, number: int) -> Tokens:
        """Return the places of the answers in a response."""
        return self.answers[number] if self.answers else NO_ANSWERS

    def written(self, number: int) -> int:
        """Return how many tokens of a response the model wrote."""
        return len(self.responses[number]) - int(_lengths(self.answers_in(number)).sum())


class ReplayRow(msgspec.Struct, frozen=True):
    """The gain of drafting under one setting; all numbers are over ``groups`` and all their responses.

    ``acceptance_length`` is tokens per step, bonus token included; 1 is no gain.  ``siblings`` counts
    the finished ones; "live" means that all responses of a group advance together.
    """

    siblings: Siblings
    control: bool
    draft_tokens: int
    tree_nodes: int
    min_probability: float
    acceptance_length: float
    drafted_per_step: float
    accepted_share: float
    groups: int
    responses: int
    steps: int
    tokens: int


def replay(
    recordings: Sequence[Recording],
    siblings: Iterable[Siblings] = (0, 1, 3, 7, 9, "live"),
    draft_tokens: int = 8,
    tree_nodes: int = 0,
    min_probability: float = 0.0,
    *,
    control: bool = False,
    common: int = 0,
    targets: Sequence[int] | None = None,
    paths: int = 0,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[ReplayRow]:
    """Return a row per entry of ``siblings``; groups with too few responses for it are left out.

    With ``tree_nodes`` trees of so many nodes are drafted, of at most so many ``paths`` (0: no limit),
    else single paths of ``draft_tokens``.  ``control``
    takes other prompts' responses as siblings: what the group itself adds is the difference.  ``common``
    responses of each other group go to the common index, as if those groups had finished before.
    ``targets`` are the numbers of the responses to replay, all by default; "live" always advances all.
    ``progress(setting, done, of)`` is called per group.  Raises ReplayError if no group fits.
    """
    if draft_tokens < 1 or tree_nodes < 0:
        raise ReplayError(f"{draft_tokens} draft tokens, {tree_nodes} tree nodes: pass at least 1 and 0")
    if not 0 <= min_probability <= 1:
        raise ReplayError(f"a least probability of {min_probability}: pass one from 0 to 1")
    common_weight = Voting().common_weight if common else 0.0
    voting = Voting(min_probability=min_probability, common_weight=common_weight)
    rows = []
    for setting in siblings:
        fitting = [
            i for i, recording in enumerate(recordings) if _fits(recordings, recording, setting, control)
        ]
        if not fitting:
            what, most = "prompt", len(recordings)
            if not control:
                what, most = "response", max((len(r.responses) for r in recordings), default=0)
            raise ReplayError(
                f"siblings={setting}: no group has so many; there are {most} {what}s at most, this one"
                f" included, so ask for {max(most - 1, 0)} or fewer"
            )
        total = np.zeros(4, np.int64)
        for done, number in enumerate(fitting):
            if progress is not None:
                progress(f"siblings {setting}", done, len(fitting))
            index = DraftIndex(1 << 40, voting=voting)
            _fill_common(index, recordings, number, common)
            wanted: Sequence[int] = range(len(recordings[number].responses))
            if setting == "live":
                requests = _open_live(index, recordings[number])
            else:
                wanted = wanted if targets is None else [t for t in targets if t in wanted]
                requests = [_open_target(index, recordings, number, t, setting, control) for t in wanted]
            total += _play(index, requests, recordings[number], wanted, draft_tokens, tree_nodes, paths)
        if progress is not None:
            progress(f"siblings {setting}", len(fitting), len(fitting))
        responses, steps, tokens, drafted = (int(x) for x in total)
        rows.append(
            ReplayRow(
                siblings=setting,
                control=control,
                draft_tokens=draft_tokens,
                tree_nodes=tree_nodes,
                min_probability=min_probability,
                acceptance_length=tokens / steps if steps else 0.0,
                drafted_per_step=drafted / steps if steps else 0.0,
                accepted_share=(tokens - steps) / drafted if drafted else 0.0,
                groups=len(fitting),
                responses=responses,
                steps=steps,
                tokens=tokens,
            )
        )
    return rows


class ResponseSteps(msgspec.Struct, frozen=True, eq=False):
    """The steps of one response: the tokens written before each [S], the draft tokens that it accepts [S].

    Answers of an environment count for nothing.
    ``chances`` [S, K] has the probability that a draft is accepted up to each position, 0 where none is.
    """

    starts: NDArray[np.int64]
    accepted: NDArray[np.int64]
    chances: NDArray[np.float32]


def replay_steps(recording: Recording, draft_tokens: int = 8) -> list[ResponseSteps]:
    """Return all steps of a group's responses, which advance together, with drafts as long as may be."""
    index = DraftIndex(1 << 40, voting=Voting(common_weight=0.0))
    found: list[list[tuple[int, int, NDArray[np.float32]]]] = [[] for _ in recording.responses]

    def note(rows: Tokens, lengths: Tokens, accepted: Tokens, chances: NDArray[np.float32]) -> None:
        starts = (lengths - len(recording.prompt)).tolist()
        for row, start, kept, chance in zip(rows.tolist(), starts, accepted.tolist(), chances, strict=True):
            answers = recording.answers_in(row)
            answered = int(_lengths(answers[answers[:, 0] < start]).sum())
            found[row].append((start - answered, kept, chance))

    requests = _open_live(index, recording)
    _play(index, requests, recording, range(len(requests)), draft_tokens, 0, 0, note)
    return [
        ResponseSteps(
            np.array([start for start, _, _ in steps], np.int64),
            np.array([accepted for _, accepted, _ in steps], np.int64),
            np.array([chances for _, _, chances in steps], np.float32).reshape(len(steps), draft_tokens),
        )
        for steps in found
    ]


def _fits(recordings: Sequence[Recording], recording: Recording, setting: Siblings, control: bool) -> bool:
    if setting == "live":
        return bool(recording.responses)
    return setting < (len(recordings) if control else len(recording.responses))


def _fill_common(index: DraftIndex, recordings: Sequence[Recording], number: int, common: int) -> None:
    if not common:
        return
    group = index.open_group(np.zeros(0, np.int32), 0.0, FOREVER_S)
    for other, recording in enumerate(recordings):
        if other != number:
            for response in recording.responses[:common]:
                index.append(index.open_request(group), 0, response)
    index.drop_group(group)
    while index.stats().bytes_leaving:
        index.expire(0.0)


def _open_live(index: DraftIndex, recording: Recording) -> list[int]:
    group = index.open_group(recording.prompt, 0.0, FOREVER_S)
    return [index.open_request(group) for _ in recording.responses]


def _open_target(
    index: DraftIndex, recordings: Sequence[Recording], number: int, target: int, count: int, control: bool
) -> int:
    """Open a group of its own for one response, beside ``count`` siblings that have finished."""
    recording = recordings[number]
    group = index.open_group(recording.prompt, 0.0, FOREVER_S)
    for shift in range(1, count + 1):
        if control:
            others = recordings[(number + shift) % len(recordings)].responses
            text = others[target % len(others)]
        else:
            text = recording.responses[(target + shift) % len(recording.responses)]
        request = index.open_request(group)
        index.append(request, 0, text)
        index.close_request(request)
    return index.open_request(group)


def _play(
    index: DraftIndex,
    requests: list[int],
    recording: Recording,
    numbers: Sequence[int],
    draft_tokens: int,
    tree_nodes: int,
    paths: int,
    note: Callable[[Tokens, Tokens, Tokens, NDArray[np.float32]], None] | None = None,
) -> NDArray[np.int64]:
    """Play a group's responses of these numbers side by side; return the numbers of responses, steps, tokens
    and drafted tokens.

    ``note(rows, lengths, accepted, chances)`` is called for each step, of lines of drafts.
    """
    width = tree_nodes or draft_tokens
    prompt, responses = recording.prompt, [recording.responses[number] for number in numbers]
    columns = len(prompt) + max((len(r) for r in responses), default=0)
    tokens = np.full((max(len(responses), 1), columns + width + 1), NO_TOKEN, np.int32)
    for row, response in enumerate(responses):
        tokens[row, : len(prompt)] = prompt
        tokens[row, len(prompt) : len(prompt) + len(response)] = response
    ends = np.array([len(prompt) + len(r) for r in responses], np.int32)
    lengths = np.full(len(responses), len(prompt), np.int32)
    handles, rows = np.array(requests, np.int64), np.arange(len(responses), dtype=np.int32)
    limits = np.full(len(responses), width, np.int32)
    out, parents = np.zeros((2, len(responses), width), np.int32)
    probabilities, counts = np.zeros((len(responses), width), np.float32), np.zeros(len(responses), np.int32)
    offsets = np.arange(width)
    written = np.zeros_like(lengths)
    answers = _padded([recording.answers_in(number) + len(prompt) for number in numbers], columns + 1)
    answered = np.zeros_like(rows)
    total = np.array([len(responses), 0, sum(map(recording.written, numbers)), 0], np.int64)
    while True:
        answer_at, answer_end = answers[rows, answered[rows]].T
        there = lengths == answer_at
        written = written + np.where(there, answer_end - answer_at, 0)
        lengths = np.where(there, answer_end, lengths)
        answered[rows] += there
        going = lengths < ends
        places = np.arange(written.max(initial=0))
        starts = (lengths - written)[:, None]
        new_tokens = tokens[rows[:, None], np.minimum(starts + places, tokens.shape[1] - 1)]
        new_tokens = new_tokens[places < written[:, None]]
        if not going.all():
            # The last tokens go in, for siblings that still write; then the row leaves the batch.
            index.draft(
                handles, lengths, written, new_tokens, np.zeros_like(limits), out, counts, probabilities
            )
            handles, rows = handles[going], rows[going]
            lengths, ends = lengths[going], ends[going]
            limits, written, new_tokens = limits[: len(rows)], np.zeros_like(lengths), new_tokens[:0]
        size = len(rows)
        if not size:
            return total
        stops = np.minimum(ends, answers[rows, answered[rows], 0])
        truth = tokens[rows[:, None], lengths[:, None] + offsets]
        asked = (handles, lengths, written, new_tokens, limits)
        if tree_nodes:
            index.draft_trees(*asked, out, parents, counts, probabilities, paths=paths)
            accepted = _accept_tree(out[:size], parents[:size], counts[:size], truth)
        else:
            index.draft(*asked, out, counts, probabilities)
            equal = (out[:size] == truth) & (offsets < counts[:size, None])
            accepted = np.logical_and.accumulate(equal, axis=1).sum(axis=1)
            if note is not None:  # the last token of a response or a turn is never a draft's
                drafted = np.where(offsets < counts[:size, None], probabilities[:size], 0)
                note(rows, lengths, np.minimum(accepted, stops - lengths - 1), drafted)
        total[1] += size
        total[3] += int(counts[:size].sum())
        written = np.minimum(accepted + 1, stops - lengths).astype(np.int32)
        lengths = lengths + written


def _padded(answers: Sequence[Tokens], nowhere: int) -> Tokens:
    """Return all places of answers, int32 [R, A + 1, 2]; behind a response's last is one that is nowhere."""
    padded = np.full((len(answers), 1 + max(map(len, answers), default=0), 2), nowhere, np.int32)
    for row, each in enumerate(answers):
        padded[row, : len(each)] = each
    return padded


def _lengths(answers: Tokens) -> Tokens:
    return answers[:, 1] - answers[:, 0]


def _accept_tree(out: Tokens, parents: Tokens, counts: Tokens, truth: Tokens) -> NDArray[np.int64]:
    """Return how many tokens of each row the tree foresaw."""
    size, width = out.shape
    node = np.full(size, -1, np.int32)
    accepted = np.zeros(size, np.int64)
    drafted = np.arange(width) < counts[:, None]
    for depth in range(width):
        hits = (parents == node[:, None]) & (out == truth[:, depth, None]) & drafted
        found = hits.any(axis=1)
        if not found.any():
            break
        accepted += found
        node = np.where(found, hits.argmax(axis=1), width).astype(np.int32)  # parent of no node
    return accepted


# ---- files ----


def load(path: Path | str) -> list[Recording]:
    """Read recorded responses, in one of three forms.

    ``.npz``: arrays ``tokens``, ``offsets`` (one more than texts), ``group`` and ``response`` (-1: the
    prompt).  JSON lines of ``{"group", "responses", "prompt_token_ids"?}``.  Seer's own
    ``completions.jsonl`` of a finished run, which has no prompts, but the turns.  Raises ReplayError.
    """
    path = Path(path)
    try:
        recordings = _load_npz(path) if path.suffix == ".npz" else _load_lines(path)
    except (OSError, ValueError) as error:
        raise ReplayError(
            f"{path} cannot be read: {describe_flaw(error)}; name a file of responses"
        ) from error
    if not any(len(text) for recording in recordings for text in recording.responses):
        raise ReplayError(f"{path} holds no response tokens; give a file with at least one response")
    return recordings


def _load_npz(path: Path) -> list[Recording]:
    tokens, offsets, groups, numbers = _arrays(path, ("tokens", "offsets", "group", "response"))
    if any(array.ndim != 1 or array.dtype.kind not in "iu" for array in (tokens, offsets, numbers)):
        raise ReplayError(
            f"{path}: tokens, offsets and response must be one-dimensional arrays of integers; save them so"
        )
    if groups.ndim != 1:
        raise ReplayError(f"{path}: group has {groups.ndim} dimensions; save a one-dimensional array")
    if not len(offsets) == len(groups) + 1 == len(numbers) + 1:
        raise ReplayError(
            f"{path}: {len(groups)} groups, {len(numbers)} responses and {len(offsets)} offsets do not fit;"
            " there must be one offset more than texts"
        )
    offsets = offsets.astype(np.int64)
    if offsets[0] < 0 or offsets[-1] > len(tokens) or (np.diff(offsets) < 0).any():
        raise ReplayError(f"{path}: offsets must rise within the {len(tokens)} tokens")
    texts: dict[str, dict[int, Tokens]] = {}
    for at, (group, number) in enumerate(zip(groups.tolist(), numbers.tolist(), strict=True)):
        text = _tokens(tokens[offsets[at] : offsets[at + 1]], f"{path}, text {at}")
        if texts.setdefault(str(group), {}).setdefault(number, text) is not text:
            raise ReplayError(
                f"{path}: group {printable(str(group), SHOWN)} has response {number} twice; leave one out"
            )
    return [_recording(group, numbered) for group, numbered in texts.items()]


def _arrays(path: Path, names: Sequence[str]) -> list[NDArray[Any]]:
    if not zipfile.is_zipfile(path):
        fact = describe_flaw(ValueError("it is no zip archive, or was cut"), path.read_bytes()[:100])
        raise ReplayError(f"{path} is not an .npz of plain arrays: {fact}; save it anew")
    try:
        # Opened here, for numpy leaves a file open that it cannot read.
        with (
            path.open("rb") as file,
            warnings.catch_warnings(action="ignore"),
            np.load(file, allow_pickle=False) as archive,
        ):
            missing = [name for name in names if name not in archive.files]
            arrays = [] if missing else [archive[name] for name in names]
    # numpy raises what its parsers happen to raise: of zip, zlib, struct and of Python's own.
    except Exception as error:
        fact = "it holds Python objects" if "allow_pickle" in str(error) else describe_flaw(error)
        raise ReplayError(f"{path} is not an .npz of plain arrays: {fact}; save it anew") from error
    if missing:
        raise ReplayError(f"{path} has no array {missing[0]!r}; it needs {', '.join(names)}")
    return arrays


class _ReplayTurn(msgspec.Struct):
    tokens: Count
    answer_tokens: Count


class _ReplayLine(msgspec.Struct):
    group: str | int | None = None
    responses: list[list[int]] | None = None
    prompt_token_ids: list[int] = []
    group_id: str | None = None
    index: int | None = None
    token_ids: list[int] | None = None
    turns: list[_ReplayTurn] = []


_DECODER = msgspec.json.Decoder(_ReplayLine)


def _load_lines(path: Path) -> list[Recording]:
    texts: dict[str, dict[int, Tokens]] = {}
    answers: dict[str, dict[int, Tokens]] = {}
    for number, raw in enumerate(path.read_bytes().splitlines(), 1):
        if not raw.strip():
            continue
        where = f"{path}, line {number}"
        try:
            line = _DECODER.decode(raw)
        except UNREADABLE as error:
            raise ReplayError(
                f"{where} is not a JSON object of a group or a completion: {describe_flaw(error, raw)};"
                " mend it or leave it out"
            ) from error
        if line.group is not None and line.responses is not None:
            if str(line.group) in texts:
                raise ReplayError(
                    f"{where}: group {printable(str(line.group), SHOWN)} occurs twice;"
                    " put its responses in one line"
                )
            numbered = {-1: _tokens(line.prompt_token_ids, f"{where}, prompt_token_ids")}
            for i, response in enumerate(line.responses):
                numbered[i] = _tokens(response, f"{where}, response {i}")
            texts[str(line.group)] = numbered
        elif line.group_id is not None and line.index is not None and line.token_ids is not None:
            numbered = texts.setdefault(line.group_id, {})
            if line.index in numbered:
                raise ReplayError(
                    f"{where}: group {printable(line.group_id, SHOWN)} has response {line.index} twice;"
                    " leave one out"
                )
            numbered[line.index] = _tokens(line.token_ids, where)
            answers.setdefault(line.group_id, {})[line.index] = _answers(line.turns, line.token_ids, where)
        else:
            raise ReplayError(
                f"{where} has neither group and responses nor group_id, index and token_ids;"
                " give recorded groups or a run's completions.jsonl"
            )
    return [_recording(group, numbered, answers.get(group, {})) for group, numbered in texts.items()]


def _answers(turns: Sequence[_ReplayTurn], token_ids: Sequence[int], where: str) -> Tokens:
    """Return the places of the answers, of which two that follow each other are one."""
    found: list[list[int]] = []
    end = 0
    for turn in turns:
        start, end = end + turn.tokens, end + turn.tokens + turn.answer_tokens
        if found and found[-1][1] == start:
            found[-1][1] = end
        elif start < end:
            found.append([start, end])
    if turns and end != len(token_ids):
        raise ReplayError(
            f"{where}: turns are of {end} tokens, and token_ids has {len(token_ids)}; give a run's"
            " completions.jsonl as it was written"
        )
    return np.array(found, np.int32).reshape(-1, 2)


def _tokens(ids: Any, where: str) -> Tokens:
    array = np.asarray(ids, dtype=np.int64 if len(ids) == 0 else None)
    if array.dtype.kind not in "iu":
        raise ReplayError(f"{where}: token ids must be integers below 2^31")
    bad = np.flatnonzero((array < 0) | (array > MAX_TOKEN))
    if bad.size:
        raise ReplayError(f"{where}: token {bad[0]} is {array[bad[0]]}; token ids are 0 to 2^31 - 1")
    return np.ascontiguousarray(array, dtype=np.int32)


def _recording(
    group: str, numbered: dict[int, Tokens], answers: dict[int, Tokens] | None = None
) -> Recording:
    prompt = numbered.pop(-1, np.zeros(0, np.int32))
    numbers = sorted(numbered)
    places = tuple(answers[number] for number in numbers) if answers else ()
    return Recording(group, prompt, tuple(numbered[number] for number in numbers), places)
