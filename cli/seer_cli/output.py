"""Where a command's results go: files that are written whole, and never over what the command reads."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click
import msgspec
from seer_host.line_files import is_special, new_beside

from seer_core.errors import OutputError

__all__ = [
    "JSON_OPTION",
    "RUN_FILES",
    "TRACE",
    "InputPath",
    "check_apart",
    "check_writable",
    "names_of_runs",
    "replacing",
    "unwritable",
    "write_json",
]

TRACE = "trace.jsonl"
RUN_FILES = ("completions.jsonl", TRACE, "summary.json")
"""What ``seer run`` writes into a directory."""
JSON_OPTION = click.option(
    "--json", "json_file", type=click.Path(path_type=Path), help="Write the same as JSON."
)


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
            raise unwritable(path, error) from error


def names_of_runs(directories: Sequence[Path]) -> list[str]:
    """Return what to call runs: the names of their directories, or the paths where names are equal."""
    names = [each.resolve().name for each in directories]
    return names if len(set(names)) == len(names) else [str(each) for each in directories]


def _inputs_of_command() -> list[Path]:
    """Return the paths that the running command was given to read."""
    context = click.get_current_context(silent=True)
    if context is None:
        return []
    reading = [each.name for each in context.command.params if isinstance(each.type, InputPath)]
    values = [context.params[name] for name in reading if name and context.params.get(name) is not None]
    return [path for value in values for path in (value if isinstance(value, tuple) else [value])]


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
        raise unwritable(path, error) from error


def write_json(path: str | Path, value: Any) -> None:
    """Write a value as indented JSON, whole or not at all.

    Raises:
        OutputError: the file cannot be written.
    """
    text = msgspec.json.format(msgspec.json.encode(value), indent=2) + b"\n"
    with replacing(Path(path)) as new:
        new.write_bytes(text)


def unwritable(path: Path, error: OSError) -> OutputError:
    """Return the error that says why a file or a directory cannot be written."""
    return OutputError(
        f"cannot write {path}: {error.strerror}; make room or name another place"
        " (what was written before is kept)"
    )
