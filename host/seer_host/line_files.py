"""Files that appear whole or not at all, lines that are never cut, directories that one process writes."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import structlog

from seer_core.errors import OutputError

__all__ = ["NO_SYNC", "LineFile", "claim", "is_special", "new_beside"]

log = structlog.get_logger("seer")

NO_SYNC = (errno.EINVAL, errno.ENOTSUP, errno.ENOSYS)
"""Errors of a file system, a device or a pipe that cannot sync."""


@contextlib.contextmanager
def claim(directory: Path, what: str) -> Iterator[None]:
    """Keep other processes that claim it out of a directory, until the ``with`` block ends or this one dies.

    ``what`` they do there is the subject of the error, such as "another run is training into out".

    Raises:
        OSError: the directory cannot be opened.
        OutputError: another process has claimed it.
    """
    opened = os.open(directory, os.O_RDONLY)
    try:
        try:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise OutputError(f"{what}; let it end first, or name another directory") from error
        except OSError as error:
            log.warning(
                "not_locked", reason=f"{directory} cannot be locked: {error.strerror}; start no second run"
            )
        yield
    finally:
        os.close(opened)


def is_special(path: Path) -> bool:
    """Return whether ``path`` is an existing device, pipe or directory, which must not be replaced."""
    return path.exists() and not path.is_file()


def new_beside(path: Path) -> Path:
    """Create an empty file beside ``path``, with its suffix and rights, to replace it by renaming.

    Raises:
        OSError: it cannot be created, or ``path`` exists and is not writable.
    """
    new = path.with_name(f".{path.stem}.{secrets.token_hex(4)}{path.suffix}")
    old = path.stat() if path.exists() else None
    if old is not None and not os.access(path, os.W_OK):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))
    os.close(os.open(new, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o666))
    if old is not None:
        new.chmod(old.st_mode & 0o7777)
    return new


class LineFile:
    """A new file of lines: each is there whole or not at all, even if the process dies or the disk is full.

    Nothing is buffered: a line is with the operating system when ``write`` returns.
    """

    def __init__(self, path: str | os.PathLike[str], *, hidden: bool = False) -> None:
        """Open the file and replace an existing one; a ``hidden`` file has another name until ``show``.

        Raises:
            OSError: it cannot be opened.
        """
        self.path = Path(path)
        special = is_special(self.path)
        self._target = self.path if special else Path(os.path.realpath(self.path))
        self._hidden = new_beside(self._target) if hidden and not special else None
        self._file = (self._hidden or self._target).open("wb", buffering=0)
        self._end = 0

    def write(self, line: bytes) -> None:
        """Write a line, given without its end.

        Raises:
            OSError: it cannot be written; the file is then as before.
        """
        rest = memoryview(line + b"\n")
        try:
            while rest:
                rest = rest[self._file.write(rest) :]
        except BaseException:
            with contextlib.suppress(OSError):  # a device cannot be truncated
                self._file.truncate(self._end)
                self._file.seek(self._end)
            raise
        self._end += len(line) + 1

    def sync(self) -> None:
        """Wait until the disk has all lines, where the file system can.

        Raises:
            OSError: the disk has failed.
        """
        try:
            os.fdatasync(self._file.fileno())
        except OSError as error:
            if error.errno not in NO_SYNC:
                raise

    @property
    def deleted(self) -> bool:
        """Whether it has no name any more, so that what is written is lost."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    @property
    def closed(self) -> bool:
        """Whether it has been closed."""
        return self._file.closed

    def show(self) -> None:
        """Replace the file at ``path``."""
        if self._hidden is not None:
            os.replace(self._hidden, self._target)
            self._hidden = None

    def close(self) -> None:
        """Close it; a file that is still hidden is deleted."""
        self._file.close()
        if self._hidden is not None:
            self._hidden.unlink(missing_ok=True)
            self._hidden = None
