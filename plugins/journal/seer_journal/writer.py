"""The journal's files as they are written: by a thread, many records at a time."""

from __future__ import annotations

import asyncio
import contextlib
import os
import queue
import threading
from collections import deque
from pathlib import Path

import structlog
from seer_host.line_files import NO_SYNC

from seer_journal.records import Opened, Record, encode

__all__ = ["SUFFIX", "RecordWriter"]

log = structlog.get_logger("seer")

SUFFIX = ".journal"
STUCK_S = 60.0
"""A disk that takes longer than this for what is waited for is given up."""


class RecordWriter:
    """Appends records to numbered files of a directory, in a thread of its own.

    While the disk is at work, what comes gathers, and goes there at once: one sync for all.  With ``sync``
    records are on disk when ``synced`` returns, otherwise with the operating system.  An error ends it:
    ``failed`` is the reason, and later records are dropped.
    """

    def __init__(
        self,
        directory: Path,
        number: int,
        opened: Opened,
        *,
        sync: bool,
        segment_bytes: int,
        most_bytes: int | None = None,
    ) -> None:
        """Begin the file of this number.

        Raises:
            OSError: it cannot be written.
        """
        self.failed = ""
        self.written_bytes = 0
        self._directory, self._number, self._opened = directory, number, opened
        self._sync, self._segment_bytes, self._most_bytes = sync, segment_bytes, most_bytes
        self._put = self._safe = 0
        self._waiting: deque[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = deque()
        self._queue: queue.SimpleQueue[Record | None] = queue.SimpleQueue()
        self._open_segment()
        self._thread = threading.Thread(target=self._work, name="seer-journal", daemon=True)
        self._thread.start()

    def put(self, record: Record) -> None:
        """Give a record to the thread, and return at once."""
        if not self.failed:
            self._put += 1
            self._queue.put(record)

    async def synced(self) -> None:
        """Wait until all records put so far are safe, or writing has failed."""
        if self.failed or self._safe >= self._put:
            return
        loop = asyncio.get_running_loop()
        safe = loop.create_future()
        self._waiting.append((self._put, loop, safe))
        if self.failed or self._safe >= self._put:  # meanwhile
            return
        try:
            async with asyncio.timeout(STUCK_S):  # wait_for may swallow a cancellation in Python 3.11
                await safe
        except TimeoutError:
            self._fail(f"the disk has taken nothing for {STUCK_S:g} s")

    def close(self) -> None:
        """Write what is left and end; a disk that hangs is left alone in the end."""
        self._queue.put(None)
        self._thread.join(STUCK_S)

    def _work(self) -> None:
        ended = False
        while not ended:
            batch = [self._queue.get()]
            with contextlib.suppress(queue.Empty):
                while True:
                    batch.append(self._queue.get_nowait())
            ended = None in batch
            records = [record for record in batch if record is not None]
            if not self.failed and records:
                try:
                    self._write(records)
                except OSError as error:
                    self._fail(error.strerror or str(error))
                except Exception as error:  # it ends, and must not be waited for
                    self._fail(f"{type(error).__name__}: {error}")
            self._safe += len(records)
            self._notify()
        with contextlib.suppress(OSError):
            os.close(self._file)

    def _write(self, records: list[Record]) -> None:
        if self._size > self._segment_bytes:
            before = self._file
            self._number += 1
            try:
                self._open_segment()
            finally:
                if self._file != before:
                    os.close(before)
            self._drop_oldest()
        self._append(b"".join(map(encode, records)))

    def _append(self, data: bytes) -> None:
        rest = memoryview(data)
        while rest:
            rest = rest[os.write(self._file, rest) :]
        self._size += len(data)
        self.written_bytes += len(data)
        if self._sync:
            try:
                os.fdatasync(self._file)
            except OSError as error:
                if error.errno not in NO_SYNC:
                    raise
                self._sync = False
                log.warning("journal_not_synced", reason=f"{self._directory}: the file system cannot sync")

    def _drop_oldest(self) -> None:
        """Delete the oldest files beyond ``most_bytes``."""
        if self._most_bytes is None:
            return
        files = sorted(self._directory.glob(f"*{SUFFIX}"))
        sizes = [path.stat().st_size for path in files]
        while len(files) > 1 and sum(sizes) > self._most_bytes:
            files.pop(0).unlink(missing_ok=True)
            sizes.pop(0)

    def _open_segment(self) -> None:
        path = self._directory / f"{self._number:06d}{SUFFIX}"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        self._size = 0
        self._append(encode(self._opened))
        if self._sync:
            directory = os.open(self._directory, os.O_RDONLY)
            try:
                os.fsync(directory)
            except OSError as error:
                if error.errno not in NO_SYNC:
                    raise
            finally:
                os.close(directory)

    def _fail(self, reason: str) -> None:
        if not self.failed:
            self.failed = reason
            log.error("journal_stopped", directory=str(self._directory), reason=reason)
        self._notify()

    def _notify(self) -> None:
        """End the waits for what is safe now; of all, once writing has failed."""
        still: list[tuple[int, asyncio.AbstractEventLoop, asyncio.Future[None]]] = []
        with contextlib.suppress(IndexError):
            while True:
                mark, loop, safe = self._waiting.popleft()
                if mark > self._safe and not self.failed:
                    still.append((mark, loop, safe))
                    continue
                with contextlib.suppress(RuntimeError):  # the loop has been closed
                    loop.call_soon_threadsafe(_settle, safe)
        self._waiting.extend(still)


def _settle(safe: asyncio.Future[None]) -> None:
    if not safe.done():
        safe.set_result(None)
