"""The current weights, kept as they were when they were loaded: for an instance that starts later.

Trainers save the next checkpoint over the last one, and delete all but a few.  So engines never load the
user's directory but a copy of its tensors, made beforehand, and the copy's digest is looked at before an
instance that comes late may load it.  Hard links would cost nothing, but a file written anew in place changes
under all its names, and that is how safetensors are saved.  Where the file system can, a copy is a reflink,
which costs no room until the original changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import attrs

from seer_core.errors import EngineError
from seer_core.weights import WeightSpec, directory

__all__ = ["FIRST_WEIGHTS", "NO_COPY", "WeightStore", "Weights"]

NO_COPY = "none"
"""What stands in ``[seer].weights_dir`` if no copy is wanted."""

PREFIX = "seer-weights-"
LEFT_OVER_S = 60.0
"""Older copies that nobody has locked belong to a process that was killed."""
PATTERNS = ("*.safetensors", "*.safetensors.index.json")
FICLONE = 0x40049409
"""``ioctl`` that makes a file share its blocks with another (Linux, ``linux/fs.h``)."""


@attrs.frozen
class Weights:
    """Weights of one version: what the user named, and what engines load.

    ``digest`` is over the names and bytes of all files of tensors; empty where ``source`` is no directory of
    them, and keeping them is not the runtime's business.
    """

    version: int
    source: WeightSpec
    kept: WeightSpec
    digest: str = ""

    def check(self) -> None:
        """Make sure that these are the weights which were loaded first under this version.

        Raises:
            EngineError: they are gone or have changed.
        """
        try:
            found = _digest(_files(Path(str(self.kept))))
        except OSError as error:
            raise EngineError(f"{self._name} cannot be read any more: {error}") from error
        if found != self.digest:
            raise EngineError(
                f"{self._name} have changed: their digest is {found}, and was {self.digest} when they were"
                " loaded; update the weights to go on with what is there"
            )

    @property
    def _name(self) -> str:
        return f"the weights of version {self.version}, from {str(self.source)!r}, in {str(self.kept)!r}"


FIRST_WEIGHTS = Weights(0, directory(""), directory(""))
"""Those with which engines start, from wherever their config says."""


class WeightStore:
    """Copies of weights, in a directory of its own under ``place``, or under the temporary directory.

    With ``place`` ``none`` only digests are kept: then a late instance needs the checkpoint as it was.
    """

    def __init__(self, place: str = "") -> None:
        self._place = place
        self._root: Path | None = None
        self._lock: int | None = None

    def keep(self, source: WeightSpec, version: int) -> Weights:
        """Keep what is in ``source`` now; blocks for as long as copying and reading it takes.

        Raises:
            EngineError: it cannot be read, it changes meanwhile, or there is no room for a copy.
        """
        try:
            files = [] if source.directory is None else _files(Path(source.directory))
            if not files:
                return Weights(version, source, source)
            if self._place == NO_COPY:
                return Weights(version, source, source, _digest(files))
            if self._root is None:
                self._root, self._lock = _make_root(Path(self._place or tempfile.gettempdir()))
            copy = self._root / str(version)
            self.drop(version)
            copy.mkdir()
            with ThreadPoolExecutor() as pool:
                list(pool.map(_copy, files, [copy / file.name for file in files]))
            return Weights(version, source, directory(copy), _digest(_files(copy)))
        except OSError as error:
            self.drop(version)
            where = self._root or self._place or tempfile.gettempdir()
            raise EngineError(
                f"the weights in {str(source)!r} cannot be copied to {str(where)!r}: {error}; if there is"
                f' no room, name another place in [seer].weights_dir, or "{NO_COPY}" to keep a digest alone'
            ) from error
        except EngineError:
            self.drop(version)
            raise

    def drop(self, version: int) -> None:
        """Delete the copy of a version, if there is one."""
        if self._root is not None:
            shutil.rmtree(self._root / str(version), ignore_errors=True)

    def close(self, current: Weights) -> Weights:
        """Delete all copies; return the current weights as those who start again must find them."""
        if self._root is not None and self._lock is not None:
            shutil.rmtree(self._root, ignore_errors=True)
            os.close(self._lock)
            self._root = self._lock = None
        return attrs.evolve(current, kept=current.source)


def _make_root(place: Path) -> tuple[Path, int]:
    """Make a directory for copies, locked while this process lives; delete those of ours that are not."""
    place.mkdir(parents=True, exist_ok=True)
    for other in place.glob(f"{PREFIX}*"):
        with suppress(OSError):  # somebody else's, or gone
            status = other.lstat()
            if status.st_uid == os.getuid() and time.time() - status.st_mtime > LEFT_OVER_S:
                os.close(_locked(other))
                shutil.rmtree(other, ignore_errors=True)
    root = Path(tempfile.mkdtemp(prefix=PREFIX, dir=place))
    return root, _locked(root)


def _locked(directory: Path) -> int:
    """Return a descriptor of a directory that nobody else has locked; a BlockingIOError if somebody has."""
    lock = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise
    return lock


def _files(directory: Path) -> list[Path]:
    return sorted(path for pattern in PATTERNS for path in directory.glob(pattern) if path.is_file())


def _digest(files: Sequence[Path]) -> str:
    """Return a digest over names and bytes, 32 hexadecimal digits."""
    with ThreadPoolExecutor() as pool:
        lines = [
            f"{file.name} {digest}\n" for file, digest in zip(files, pool.map(_sha256, files), strict=True)
        ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("xb") as write:
        before = os.fstat(read.fileno())
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError:  # another file system, or one that cannot
            shutil.copyfileobj(read, write, 1 << 22)
        after = os.fstat(read.fileno())
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise EngineError(f"{str(source)!r} changed while it was read; update once it is written")
