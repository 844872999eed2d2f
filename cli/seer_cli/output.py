"""Where a command's results go: files that are written whole, and never over what the command reads."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import click
import msgspec

from seer_core.errors import OutputError
from seer_core.line_files import LineFile, is_special, new_beside
from seer_core.model import Completion
from seer_core.scheduling.trace import TraceWriter

__all__ = [
    "RUN_FILES",
    "InputPath",
    "OutputDir",
    "check_apart",
    "check_writable",
    "replacing",
    "write_json",
]

RUN_FILES = ("completions.jsonl", "trace.jsonl", "summary.json")
"""What ``seer run`` writes into a directory."""

BYTES_PER_REQUEST = 4096
"""Least free space asked for per request before work starts: tokens and log-probs of a short answer."""


class InputPath(click.Path):
    """The type of options and arguments that name what a command reads, and so must not write."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)


def check_apart(*outputs: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Refuse, before work starts, outputs that are each other or what the command reads; None is none.

    It reads ``inputs`` and what it was given as an ``InputPath``; of a directory, the files of a run.

    Raises:
        OutputError: one is.
    """
    wanted = [path for path in outputs if path is not None]
    read = [*inputs, *_inputs_of_command()]
    # ``Path.is_dir`` raises for a name that is too long.
    read += [path / name for path in read if os.path.isdir(path) for name in RUN_FILES]
    for number, path in enumerate(wanted):
        if any(_same(path, other) for other in read):
            raise OutputError(f"cannot write {path}: this command reads it; name another file")
        if any(_same(path, other) for other in wanted[:number]):
            raise OutputError(f"cannot write {path}: this command writes it already; name another file")


def check_writable(*outputs: Path | None, inputs: Iterable[Path] = ()) -> None:
    """Find out before work starts whether result files can be written, and are apart as ``check_apart`` says.

    Raises:
        OutputError: one cannot, or is not.
    """
    check_apart(*outputs, inputs=inputs)
    for path in outputs:
        if path is None:
            continue
        try:
            if path.is_dir():
                raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
            path.parent.mkdir(parents=True, exist_ok=True)
            if not is_special(path):
                new_beside(Path(os.path.realpath(path))).unlink()
        except OSError as error:
            raise _unwritable(path, error) from error


def _inputs_of_command() -> list[Path]:
    """Return the paths that the running command was given to read."""
    context = click.get_current_context(silent=True)
    if context is None:
        return []
    reading = [each.name for each in context.command.params if isinstance(each.type, InputPath)]
    return [context.params[name] for name in reading if name and context.params.get(name) is not None]


def _same(path: Path, other: Path) -> bool:
    """Return whether two names are one file, be it there yet or not; devices and pipes can be shared."""
    try:
        if is_special(path):
            return False
        if path.exists() and other.exists():
            return path.samefile(other)
    except OSError:  # a file that cannot be looked up cannot be opened either, which is reported later
        return False
    return os.path.realpath(path) == os.path.realpath(other)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield a new file to write, which takes the place of ``path`` at the end if all went well.

    Raises:
        OutputError: it cannot be written.
    """
    try:
        if is_special(path):
            yield path
            return
        target = Path(os.path.realpath(path))
        new = new_beside(target)
        try:
            yield new
            os.replace(new, target)
        finally:
            new.unlink(missing_ok=True)
    except OSError as error:
        raise _unwritable(path, error) from error


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    with replacing(Path(path)) as new:
        new.write_bytes(text)


class OutputDir:
    """A run's output directory, open; every completion is on disk when ``completion`` returns.

    Until ``begin`` its files have other names: a run that never begins leaves nothing, and what an earlier
    run wrote is still there.
    """

    def __init__(self, path: str | Path, requests: int, overwrite: bool) -> None:
        """Create the directory and its files.

        Raises:
            OutputError: it cannot be written, is short of space, or holds an earlier run's results.
        """
        self.path = Path(path)
        self.begun = False
        self._overwrite = overwrite
        self._made: list[Path] = []
        with contextlib.ExitStack() as undo:
            undo.callback(self._remove_made)
            try:
                self._made = [each for each in (self.path, *self.path.parents) if not each.exists()]
                self.path.mkdir(parents=True, exist_ok=True)
                self._refuse_earlier()
                self._refuse_narrow(requests * BYTES_PER_REQUEST)
                self._completions = LineFile(self.path / "completions.jsonl", hidden=True)
                undo.callback(self._completions.close)
                self.trace = TraceWriter(self.path / "trace.jsonl", hidden=True)
            except OSError as error:
                raise _unwritable(self.path, error) from error
            undo.pop_all()

    def _refuse_narrow(self, needed: int) -> None:
        free = shutil.disk_usage(self.path).free
        if free < needed:
            raise OutputError(
                f"{self.path} has {free:,} bytes free; {needed // BYTES_PER_REQUEST:,} requests need at least"
                f" {needed:,}. Free some space or name another directory"
            )

    def _refuse_earlier(self) -> None:
        earlier = [name for name in RUN_FILES if (self.path / name).exists()]
        if earlier and not self._overwrite:
            raise OutputError(
                f"{self.path} already holds {', '.join(earlier)}; name another directory, or replace"
                " them with --overwrite"
            )

    def begin(self) -> None:
        """Put the files in the place of an earlier run's, now that there is something to write.

        Raises:
            OutputError: they cannot be, or another run was faster.
        """
        self._refuse_earlier()
        try:
            (self.path / "summary.json").unlink(missing_ok=True)
            self._completions.show()
            self.trace.file.show()
        except OSError as error:
            raise _unwritable(self.path, error) from error
        self.begun = True

    def __enter__(self) -> OutputDir:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        try:
            try:
                self._completions.close()
            finally:
                self.trace.close()
        except OSError as failure:
            if error is None:  # else what stays unwritten is the lesser trouble, or the very same
                raise _unwritable(self.path, failure) from failure
        if not self.begun:
            self._remove_made()

    def _remove_made(self) -> None:
        """Remove the directories that were made for it, as far as they are empty."""
        for directory in self._made:
            with contextlib.suppress(OSError):
                directory.rmdir()

    def completion(self, completion: Completion) -> None:
        """Write one completion of a run that has begun."""
        assert self.begun
        try:
            self._completions.write(msgspec.json.encode(completion, enc_hook=list))
        except OSError as error:
            raise _unwritable(self._completions.path, error) from error

    def summary(self, summary: dict[str, Any]) -> None:
        """Write the summary of a run that has begun."""
        assert self.begun
        write_json(self.path / "summary.json", summary)


def _unwritable(path: Path, error: OSError) -> OutputError:
    return OutputError(
        f"cannot write {path}: {error.strerror}; make room or name another place"
        " (what was written before is kept)"
    )
