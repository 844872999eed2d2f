"""The journal of a rollout: another process goes on with it, token for token.

Tokens depend on a request's seed and their position alone, so a rollout that is begun anew gives the same
ones; a journal saves the time.  Give one to ``Runtime.rollout``, ``Session.open`` and their like:

    with DiskJournal("out/journal") as journal, Session(config) as session:
        result = session.rollout(prompts, iteration=7, journal=journal)
"""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Literal

import msgspec
import structlog
from seer_host.images import PlacedImages
from seer_host.line_files import claim

from seer_core.errors import InputError, OutputError, quote
from seer_core.model import ChunkRecord, PromptGroup, TurnRecord, WrittenResponse
from seer_core.model.arrays import Logprobs, PromptLogprobs, Tokens, TopLogprobs
from seer_journal.reader import read
from seer_journal.records import (
    FORMAT,
    Aborted,
    Answered,
    AnsweredImage,
    Begun,
    Opened,
    Record,
    WrittenChunk,
    difference,
)
from seer_journal.writer import SUFFIX, RecordWriter

__all__ = ["DiskJournal", "Safety"]

log = structlog.get_logger("seer")

Safety = Literal["disk", "system"]
"""When a completion may be returned: its tokens are on disk, or with the operating system."""

SEGMENT_BYTES = 64 << 20

SESSION_BYTES = 4 << 30
"""Of the files of a session's journal, and of what it holds in memory; the oldest groups are dropped."""


class DiskJournal:
    """A ``seer_session.journal.Journal`` in a directory, which one process has open at a time.

    ``facts`` are what the run's tokens depend on beside groups and weights, or what its user wants to be the
    same, by names that a user understands.  With ``replace`` a group that is another one than the journal's
    of its id takes that one's place, where it is refused otherwise, and a group may come again within one
    process: a session that serves a trainer, or a server, needs both.  Beyond ``most_bytes``, of files and in
    memory, the oldest are dropped.  With ``safety`` "disk" a power failure loses no completion that
    was returned; with "system" the death of the process does not.  ``found_responses``, ``found_tokens`` and
    ``damaged_bytes`` are what an earlier process had left; ``failed`` is the reason why nothing is written
    any more.
    """

    def __init__(
        self,
        directory: str | Path,
        *,
        facts: Mapping[str, str] = {},
        safety: Safety = "disk",
        replace: bool = False,
        most_bytes: int | None = None,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        """Open the journal of a directory, or begin one.

        Raises:
            InputError: it is of another run, its files are no journal, or its form is another.
            OutputError: it cannot be written, or another process has it open.
        """
        self.directory = Path(directory)
        with contextlib.ExitStack() as undo:
            try:
                self.directory.mkdir(parents=True, exist_ok=True)
                undo.enter_context(
                    claim(self.directory, f"another process writes the journal in {self.directory}")
                )
                contents = read(self.directory)
                opened = contents.opened or Opened(FORMAT, secrets.token_hex(8), dict(facts))
                _check_facts(self.directory, opened.facts, facts)
                self._writer = RecordWriter(
                    self.directory,
                    contents.number + 1,
                    opened,
                    sync=safety == "disk",
                    segment_bytes=segment_bytes,
                    most_bytes=most_bytes,
                )
            except OSError as error:
                raise OutputError(
                    f"cannot keep a journal in {self.directory}: {error.strerror}; make room, name another"
                    " directory, or do without a journal"
                ) from error
            self._claim = undo.pop_all()
        if most_bytes is not None:
            contents.shrink(most_bytes)
        self._contents = contents
        self._replace, self._most_bytes = replace, most_bytes
        self.found_responses, self.found_tokens = contents.finished, contents.tokens
        self.damaged_bytes = contents.damaged_bytes
        if contents.damaged_bytes:
            log.warning(
                "journal_damaged",
                directory=str(self.directory),
                bytes=contents.damaged_bytes,
                remedy="what stood there is computed again",
            )

    def __enter__(self) -> DiskJournal:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @classmethod
    def of_session(cls, directory: str | Path) -> DiskJournal:
        """Open the journal of a session that serves a trainer, or of a server, for rollout after rollout.

        Raises:
            InputError, OutputError: as for any other.
        """
        return cls(directory, safety="system", replace=True, most_bytes=SESSION_BYTES)

    @property
    def failed(self) -> str:
        """The reason why nothing is written any more; empty while it is."""
        return self._writer.failed

    @property
    def written_bytes(self) -> int:
        """Bytes that this process has written."""
        return self._writer.written_bytes

    def check(self, groups: Sequence[PromptGroup]) -> None:
        """Find out early whether these are the journal's groups, before engines start for them.

        Raises:
            InputError: one is another group.
        """
        for group in groups:
            if (known := self._contents.groups.get(group.id)) is not None:
                self._require_same(Begun.of(group, known.version, {}))

    def begin(
        self,
        groups: Sequence[PromptGroup],
        version: int,
        fingerprints: Mapping[str, str],
        end_token_ids: Sequence[int] = (),
    ) -> Sequence[Sequence[WrittenResponse]]:
        """As ``seer_session.journal.Journal.begin``."""
        ends = tuple(end_token_ids)
        records = [Begun.of(group, version, dict(fingerprints), ends) for group in groups]
        if not self._replace:
            for record in records:
                self._require_same(record)
        found = [self._begin(record) for record in records]
        for group, responses in zip(groups, found, strict=True):
            for response in responses:
                if isinstance(response.attachments, PlacedImages):
                    response.attachments = PlacedImages.joined(group.attachments, response.attachments)
        return found

    def _require_same(self, record: Begun) -> None:
        """Raise InputError if the journal has another group of this id."""
        known = self._contents.groups.get(record.group_id)
        if known is None or (found := difference(known, record)) is None:
            return
        name, before, now = found
        raise InputError(
            f"the journal in {self.directory} has another group {quote(record.group_id)}: its {name} was"
            f" {_shown(before)} and is {_shown(now)} now; restore it, or begin anew in another directory"
        )

    def _begin(self, record: Begun) -> Sequence[WrittenResponse]:
        name = record.group_id
        known = self._contents.groups.get(name)
        if known is None or difference(known, record) is not None:
            self._contents.forget(name)
            self._put(record)
            return []
        written = self._contents.responses[name]
        if self._replace:  # it may come again
            return deepcopy(written)
        self._contents.forget(name)
        return written

    def chunk(
        self,
        request_id: str,
        start: int,
        token_ids: Tokens,
        logprobs: Logprobs,
        stopped: bool,
        record: ChunkRecord,
        top_logprobs: TopLogprobs | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> None:
        """As ``seer_session.journal.Journal.chunk``."""
        account = msgspec.structs.astuple(record)
        others = top_logprobs, prompt_logprobs
        self._put(WrittenChunk(request_id, start, token_ids, logprobs, stopped, account, *others))

    def answered(
        self,
        request_id: str,
        start: int,
        token_ids: Tokens,
        turn: TurnRecord,
        done: bool,
        images: PlacedImages | None = None,
    ) -> None:
        """As ``seer_session.journal.Journal.answered``."""
        seen = () if images is None else AnsweredImage.all_of(images)
        self._put(Answered(request_id, start, token_ids, msgspec.structs.astuple(turn), done, seen))

    def aborted(self, request_id: str) -> None:
        """As ``seer_session.journal.Journal.aborted``."""
        self._put(Aborted(request_id))

    def _put(self, record: Record) -> None:
        self._writer.put(record)
        if self._replace:
            self._contents.take(record)
            if self._most_bytes is not None:
                self._contents.shrink(self._most_bytes)

    async def synced(self) -> None:
        """As ``seer_session.journal.Journal.synced``."""
        await self._writer.synced()

    def close(self) -> None:
        """Write what is left, and let other processes open it.  Idempotent."""
        self._writer.close()
        self._claim.close()

    def remove(self) -> None:
        """Close it and delete its files, once what it holds is kept elsewhere."""
        self._writer.close()
        for path in self.directory.glob(f"*{SUFFIX}"):
            path.unlink(missing_ok=True)
        self._claim.close()
        with contextlib.suppress(OSError):
            self.directory.rmdir()


def _check_facts(directory: Path, before: Mapping[str, str], now: Mapping[str, str]) -> None:
    for name in sorted({*before, *now}):
        if before.get(name) != now.get(name):
            raise InputError(
                f"the journal in {directory} is of another run: {name} was {quote(before.get(name))} and is"
                f" {quote(now.get(name))} now; restore it, or begin anew in another directory"
            )


def _shown(value: object) -> str:
    return f"{len(value)} other tokens" if isinstance(value, Tokens) else quote(value)
