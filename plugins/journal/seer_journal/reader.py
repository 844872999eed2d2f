"""The contents of a journal's files, put together: groups, and their responses as far as they are written."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
from seer_host.images import PlacedImages

from seer_core.errors import InputError, quote
from seer_core.model import ChunkRecord, TurnRecord, WrittenResponse
from seer_core.model.arrays import LEAST_LOGPROB, TopLogprobs
from seer_journal.records import FORMAT, Aborted, Answered, Begun, Damaged, Opened, Record, WrittenChunk, scan
from seer_journal.writer import SUFFIX

__all__ = ["Contents", "read"]

TOKEN_BYTES = 4
PAIR_BYTES = 8
"""Of a token and its log-prob."""
KEPT_BYTES = 512
"""What Python takes for a group, a response or a chunk, beside their tokens: about, and rather too much."""


@attrs.define(eq=False)
class Contents:
    """A journal as it was found: ``opened`` is None where there is none yet; ``number`` is the last file's.

    A response lacks what stood behind a record that is damaged or lost: that is computed again.
    ``damaged_bytes`` counts bytes that are no record, ``torn_bytes`` those at the end of a file, where
    a process died as it wrote.
    """

    opened: Opened | None = None
    number: int = 0
    groups: dict[str, Begun] = attrs.Factory(dict)
    responses: dict[str, list[WrittenResponse]] = attrs.Factory(dict)
    kept_bytes: int = 0
    """Of the memory that groups and responses take, about."""
    damaged_bytes: int = 0
    torn_bytes: int = 0

    @property
    def tokens(self) -> int:
        """Tokens of all responses."""
        return sum(len(each.token_ids) for group in self.responses.values() for each in group)

    @property
    def finished(self) -> int:
        """Responses that are over."""
        return sum(each.finish_reason is not None for group in self.responses.values() for each in group)

    def take(self, record: Record) -> None:
        """Add a record."""
        match record:
            case Begun():
                if self.groups.get(record.group_id) != record:
                    self.forget(record.group_id)
                    self.groups[record.group_id] = record
                    self.responses[record.group_id] = [WrittenResponse() for _ in range(record.n)]
                    self.kept_bytes += _group_bytes(record)
            case WrittenChunk():
                self._extend(record)
            case Answered():
                self._answer(record)
            case Aborted():
                response = self._response(record.request_id)
                if response is not None and response.finish_reason is None:
                    response.finish_reason = "aborted"

    def shrink(self, most_bytes: int) -> None:
        """Forget the oldest groups beyond so many bytes."""
        while self.kept_bytes > most_bytes and self.groups:
            self.forget(next(iter(self.groups)))

    def forget(self, group_id: str) -> None:
        """Drop a group, if there is one of this id."""
        if (group := self.groups.pop(group_id, None)) is not None:
            written = sum(map(_written_bytes, self.responses.pop(group_id)))
            self.kept_bytes -= _group_bytes(group) + written

    def _response(self, request_id: str) -> WrittenResponse | None:
        group_id, _, index = request_id.rpartition("/")
        responses = self.responses.get(group_id, [])
        return responses[int(index)] if index.isdecimal() and int(index) < len(responses) else None

    def _extend(self, chunk: WrittenChunk) -> None:
        """Append what a chunk adds to its response: nothing if it is there, or if tokens before it lack."""
        response = self._response(chunk.request_id)
        if response is None or response.finish_reason is not None or chunk.start != len(response.token_ids):
            return
        if response.acting:
            return
        group = self.groups[chunk.request_id.rpartition("/")[0]]
        limit, tops = group.max_tokens, chunk.top_logprobs
        if len(chunk.token_ids) != len(chunk.logprobs) or chunk.start + len(chunk.token_ids) > limit:
            return
        asked = group.sampling.prompt_logprobs
        if asked is not None and not chunk.start:
            found = chunk.prompt_logprobs
            if found is None or not found.fits(asked, len(group.prompt_token_ids)):
                return
            response.prompt_logprobs = found
        if width := group.sampling.top_logprobs:
            if tops is None or not tops.fits(width, len(chunk.token_ids)):
                return
            if response.top_logprobs is None:
                response.top_logprobs = TopLogprobs(width)
            response.top_logprobs.extend(tops)
        response.token_ids.extend(chunk.token_ids)
        response.logprobs.extend(chunk.logprobs)
        self.kept_bytes += _chunk_bytes(chunk)
        response.chunks.append(ChunkRecord(*chunk.account))
        if chunk.stopped and group.turns:
            response.acting = True
        elif chunk.stopped:
            response.finish_reason = "stop"
        elif len(response.token_ids) == limit:
            response.finish_reason = "length"

    def _answer(self, answer: Answered) -> None:
        """Append an answer to the turn that it is of; it stays away where that turn is not whole."""
        response = self._response(answer.request_id)
        if response is None or not response.acting or answer.start != len(response.token_ids):
            return
        turn, count = TurnRecord(*answer.turn), len(answer.token_ids)
        limit = self.groups[answer.request_id.rpartition("/")[0]].max_tokens
        before = sum(each.tokens + each.answer_tokens for each in response.turns)
        if (
            before + turn.tokens != answer.start
            or turn.answer_tokens != count
            or answer.start + count > limit
        ):
            return
        response.acting = False
        response.turns.append(turn)
        if answer.images:
            places = [(each.offset, each.length) for each in answer.images]
            images = PlacedImages([each.image for each in answer.images], places)
            response.attachments = PlacedImages.joined(response.attachments or {}, images)
            self.kept_bytes += _image_bytes(images)
        response.token_ids.extend(answer.token_ids)
        response.logprobs.extend([0.0] * count)
        self.kept_bytes += PAIR_BYTES * count
        if (tops := response.top_logprobs) is not None:
            for token in answer.token_ids:
                values = [0.0, *[LEAST_LOGPROB] * (tops.width - 1)]
                tops.extend(TopLogprobs(tops.width, [token] * tops.width, values))
                self.kept_bytes += PAIR_BYTES * tops.width
        if answer.done:
            response.finish_reason = "stop"
        elif len(response.token_ids) == limit:
            response.finish_reason = "length"


def _group_bytes(group: Begun) -> int:
    """Return what a group takes of which nothing is written."""
    return KEPT_BYTES * (1 + group.n) + TOKEN_BYTES * len(group.prompt_token_ids)


def _chunk_bytes(chunk: WrittenChunk) -> int:
    return KEPT_BYTES + _pair_bytes(chunk)


def _written_bytes(response: WrittenResponse) -> int:
    """Return what a response takes more than one of which nothing is written."""
    return KEPT_BYTES * len(response.chunks) + _pair_bytes(response) + _image_bytes(response.attachments)


def _pair_bytes(written: WrittenChunk | WrittenResponse) -> int:
    """Return what tokens with log-probs take, the most probable ones included."""
    tops, prompt = written.top_logprobs, written.prompt_logprobs
    pairs = len(written.token_ids) + (0 if tops is None else len(tops.token_ids))
    if prompt is not None:
        pairs += len(prompt.logprobs)
        pairs += 0 if prompt.top_logprobs is None else len(prompt.top_logprobs.token_ids)
    return PAIR_BYTES * pairs


def _image_bytes(attachments: Mapping[str, Any] | None) -> int:
    if not isinstance(attachments, PlacedImages):
        return 0
    return sum(len(image.data or b"") for image, _, _ in attachments.placed())


def read(directory: Path) -> Contents:
    """Read the files of a directory, in the order of their numbers.

    Raises:
        OSError: a file cannot be read.
        InputError: a file is no part of one journal, or of another form.
    """
    contents = Contents()
    for path in sorted(directory.glob(f"*{SUFFIX}")):
        if not path.stem.isdecimal() or not path.is_file():
            raise InputError(f"{path} is no file of a journal; take it out of the directory")
        contents.number = int(path.stem)
        _read_file(path, contents)
    return contents


def _read_file(path: Path, contents: Contents) -> None:
    data = path.read_bytes()
    opened: Opened | None = None
    for item in scan(data):
        if isinstance(item, Damaged):
            if item.offset + item.size == len(data):
                contents.torn_bytes += item.size
            else:
                contents.damaged_bytes += item.size
        elif isinstance(item, Opened):
            opened = item
            _check(path, opened, contents.opened)
            contents.opened = contents.opened or opened
        elif opened is None:  # which run a file is of stands in its first record
            contents.damaged_bytes += len(data)
            return
        else:
            contents.take(item)


def _check(path: Path, opened: Opened, first: Opened | None) -> None:
    if opened.format != FORMAT:
        raise InputError(
            f"{path} has form {quote(opened.format)} of a journal, and this Seer reads form {FORMAT}; go on"
            " with the Seer that wrote it, or begin anew"
        )
    if first is not None and opened.run != first.run:
        raise InputError(f"{path} is of another run than the files before it; take it out of the directory")
