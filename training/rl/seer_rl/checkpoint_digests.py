"""The digests of a checkpoint's files, by which a bit that has flipped on the disk is found."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
from seer_host.json_files import UNREADABLE, describe_flaw
from seer_host.weight_copies import digest_of_files

from seer_core.errors import InputError, printable

__all__ = ["DIGESTS", "bytes_of_file", "check_digests", "write_digests"]

DIGESTS = "digests.json"


class FileDigest(msgspec.Struct, frozen=True):
    """A file as it was written."""

    bytes: int
    digest: str
    """Of its name and its bytes; it finds damage, and is no protection against an attacker."""


def write_digests(directory: Path) -> None:
    """Write the digests of all files of a directory beside them.

    Raises:
        OSError: a file cannot be read, or this one cannot be written.
    """
    files = _files_of(directory)
    with ThreadPoolExecutor() as pool:
        found = dict(zip(files, pool.map(_digest_of, files), strict=True))
    names = {path.relative_to(directory).as_posix(): digest for path, digest in found.items()}
    (directory / DIGESTS).write_bytes(msgspec.json.encode(names))


def check_digests(directory: Path) -> None:
    """Compare the files of a directory with their digests, all of them at once.

    Raises:
        InputError: a file is missing, is not as it was written, or cannot be read; or the digests are so.
            The message has no remedy.
    """
    list_of_digests = directory / DIGESTS
    raw = None
    try:
        raw = bytes_of_file(list_of_digests)
        wanted = msgspec.json.decode(raw, type=dict[str, FileDigest])
    except (OSError, *UNREADABLE) as error:
        raise InputError(f"{list_of_digests} is no list of digests: {describe_flaw(error, raw)}") from error
    if not wanted:
        raise InputError(f"{list_of_digests} is damaged: it names no file")
    there = {path.relative_to(directory).as_posix() for path in _files_of(directory)}
    if missing := sorted(wanted.keys() - there):
        raise InputError(f"{printable(str(directory / missing[0]))} is no file, and one was written")
    if further := sorted(there - wanted.keys()):
        raise InputError(
            f"{printable(str(directory / further[0]))} is not a file that {list_of_digests} names, so damage"
            " to it would not be found"
        )
    with ThreadPoolExecutor() as pool:
        flaws = pool.map(_flaw_of, [(directory / name, digest) for name, digest in wanted.items()])
        if flaw := next(filter(None, flaws), None):
            raise InputError(flaw)


def bytes_of_file(path: Path) -> bytes:
    """Return what is in a file; what is none, such as a pipe, would keep its reader waiting.

    Raises:
        OSError: it cannot be read, or is none.
    """
    if path.exists() and not path.is_file():
        raise OSError(f"{path.name} is no file")
    return path.read_bytes()


def _files_of(directory: Path) -> list[Path]:
    others = (path for path in directory.rglob("*") if path != directory / DIGESTS)
    return sorted(path for path in others if path.is_file())


def _flaw_of(file_and_digest: tuple[Path, FileDigest]) -> str | None:
    """Return what is wrong with a file, None if nothing is."""
    path, wanted = file_and_digest
    where = printable(str(path))
    try:
        found = path.stat().st_size
        if found != wanted.bytes:
            return f"{where} is damaged: it has {found:,} bytes, and {wanted.bytes:,} were written"
        if _digest_of(path) != wanted:
            return f"{where} is damaged: its {found:,} bytes are not those that were written"
    except (OSError, ValueError) as error:
        return f"{where} cannot be read: {describe_flaw(error)}"
    return None


def _digest_of(path: Path) -> FileDigest:
    return FileDigest(path.stat().st_size, digest_of_files([path]))
