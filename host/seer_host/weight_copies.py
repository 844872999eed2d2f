"""Copies of the current weights, as they were when they were loaded, for instances that start later.

Trainers save the next checkpoint over the last one, and delete all but a few.  So engines load a copy of the
user's directory, made beforehand, and the copy's digest is checked before an instance that starts later loads
it.  Hard links would cost nothing, but safetensors are saved by rewriting a file in place, which changes it
under all its names.  Where the file system can, a copy is a reflink, which takes no room until the original
changes.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import secrets
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import xxhash

from seer_core.errors import EngineError
from seer_core.ports.weights import VersionedWeights, WeightSpec, WeightStore, directory
from seer_host.scratch import Scratch

__all__ = [
    "ADAPTER_TENSORS",
    "NONCE",
    "NO_COPY",
    "WeightCopies",
    "adapter_config_of",
    "digest_of_contents",
    "digest_of_files",
    "states_of",
    "weight_files",
]

NO_COPY = "none"
"""The value of ``[seer].weights_dir`` for no copy."""

ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_TENSORS = "adapter_model.safetensors"
PATTERNS = ("*.safetensors", "*.safetensors.index.json", ADAPTER_CONFIG)
NONCE = "seer-nonce"
"""The file of a copy with a number used once, by which another machine sees that it has the same files."""

PREFIX = "seer-weights-"
FICLONE = 0x40049409
"""``ioctl`` that makes a file share its blocks with another (Linux, ``linux/fs.h``)."""


class WeightCopies(WeightStore):
    """Keeps copies of weights in a directory of its own under ``place``, or under the temporary directory.

    With ``place`` ``none`` it keeps digests alone: then an instance that starts later needs the checkpoint
    as it was.
    """

    def __init__(self, place: str = "") -> None:
        self._place = place
        self._scratch: Scratch | None = None

    def keep(self, source: WeightSpec, version: int) -> VersionedWeights:
        """Copy what is in ``source`` now; blocks while copying and reading it.

        Raises:
            EngineError: it cannot be read, it changes meanwhile, or there is no room for a copy.
        """
        try:
            files = [] if source.directory is None else weight_files(Path(source.directory))
            if not files:
                return VersionedWeights(version, source, source)
            given = Path(str(source))
            adapter_config_of(given)  # which refuses what is no adapter before anything is copied
            if self._place == NO_COPY:
                with _unchanged(given):
                    digest = digest_of_files(files)
                config = _settled_config(given, given, digest)
                return VersionedWeights(version, source, directory(str(source), digest, config), digest)
            if self._scratch is None:
                self._scratch = Scratch(PREFIX, self._place)
            copy = self._scratch.path / str(version)
            self.drop(version)
            copy.mkdir()
            with _unchanged(given), ThreadPoolExecutor() as pool:
                list(pool.map(_copy, files, [copy / file.name for file in files]))
            digest = digest_of_files(weight_files(copy))
            config = _settled_config(copy, given, digest)
            (copy / NONCE).write_text(secrets.token_hex(16))  # last: who sees it sees the files
            return VersionedWeights(version, source, directory(copy, digest, config), digest)
        except OSError as error:
            self.drop(version)
            where = self._place or tempfile.gettempdir()
            raise EngineError(
                f"the weights in {str(source)!r} cannot be copied to {str(where)!r}: {error}; if there is"
                f' no room, name another place in [seer].weights_dir, or "{NO_COPY}" to keep a digest alone'
            ) from error
        except EngineError:
            self.drop(version)
            raise

    def check(self, weights: VersionedWeights) -> None:
        """Raise EngineError if the weights are gone or have changed since they were loaded first."""
        places = f"from {str(weights.source)!r}, in {str(weights.kept)!r}"
        name = f"the weights of version {weights.version}, {places}"
        try:
            found = digest_of_files(weight_files(Path(str(weights.kept))))
        except OSError as error:
            raise EngineError(f"{name} cannot be read any more: {error}") from error
        if found != weights.digest:
            raise EngineError(
                f"{name} have changed: their digest is {found}, and was {weights.digest} when they were"
                " loaded; update the weights to go on with what is there"
            )

    def drop(self, version: int) -> None:
        """Delete the copy of a version, if there is one."""
        if self._scratch is not None:
            shutil.rmtree(self._scratch.path / str(version), ignore_errors=True)

    def close(self, current: VersionedWeights) -> VersionedWeights:
        """Delete all copies; return the current weights with their source to load from at the next start."""
        if self._scratch is not None:
            self._scratch.close()
            self._scratch = None
        return _as_given(current)


def adapter_config_of(directory: Path) -> dict[str, Any] | None:
    """Return what PEFT has written about the adapter in a directory; None if it holds no adapter.

    Raises:
        EngineError: the config or the tensors are missing, or it holds whole weights too.
        OSError: it cannot be read.
    """
    path = directory / ADAPTER_CONFIG
    names = {each.name for each in directory.glob("*.safetensors")}
    if not path.is_file():
        if ADAPTER_TENSORS in names:
            raise EngineError(
                f"{str(directory)!r} holds {ADAPTER_TENSORS} and no {ADAPTER_CONFIG}; save it with PEFT's"
                " save_pretrained"
            )
        return None
    if names != {ADAPTER_TENSORS}:
        found = "no safetensors" if not names else "more safetensors than " + ADAPTER_TENSORS
        raise EngineError(
            f"{str(directory)!r} holds {ADAPTER_CONFIG} and {found}; an adapter is these two files"
        )
    try:
        config = json.loads(path.read_text())
    except ValueError as error:
        raise EngineError(f"the {ADAPTER_CONFIG} of {str(directory)!r} cannot be read: {error}") from error
    if not isinstance(config, dict):
        raise EngineError(f"the {ADAPTER_CONFIG} of {str(directory)!r} is no table")
    return config


def _as_given(weights: VersionedWeights) -> VersionedWeights:
    """Return weights that are loaded from where the user has them."""
    source, config = weights.source, weights.kept.adapter_config
    if config is not None:
        known = {"digest": weights.digest} if weights.digest else {}
        source = WeightSpec(source.path, {**source.settings, **known, "adapter_config": config})
    base = None if weights.base is None else _as_given(weights.base)
    return msgspec.structs.replace(weights, kept=source, base=base)


def _copy(source: Path, target: Path) -> None:
    with source.open("rb") as read, target.open("xb") as write:
        try:
            fcntl.ioctl(write.fileno(), FICLONE, read.fileno())
        except OSError:  # another file system, or one that cannot
            shutil.copyfileobj(read, write, 1 << 22)


@contextmanager
def _unchanged(directory: Path) -> Iterator[None]:
    """Raise EngineError if a weight file of a directory comes, goes or changes within a ``with`` block."""
    before = states_of(directory)
    yield
    if states_of(directory) != before:
        raise _changed(directory)


def _settled_config(place: Path, given: Path, digest: str) -> dict[str, Any] | None:
    """Return the config of an adapter in ``place``; an EngineError if those given have another digest by now.

    Adapters are written in an instant, which the times of files need not show.
    """
    config = adapter_config_of(place)
    if config is not None and digest_of_files(weight_files(given)) != digest:
        raise _changed(given)
    return config


def _changed(directory: Path) -> EngineError:
    return EngineError(
        f"the weights in {str(directory)!r} changed while they were read; update once they are written"
    )


def states_of(directory: str | Path) -> dict[str, list[int]]:
    """Return the sizes and times of the weight files of a directory, by name; a change shows in them."""
    states = {path.name: path.stat() for path in weight_files(Path(directory))}
    return {name: [each.st_size, each.st_mtime_ns] for name, each in states.items()}


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors of a directory, their index and an adapter's config, by kind and name."""
    return sorted(path for pattern in PATTERNS for path in directory.glob(pattern) if path.is_file())


def digest_of_files(files: Sequence[Path]) -> str:
    """Return a digest over names and bytes, 32 hexadecimal digits."""
    with ThreadPoolExecutor() as pool:
        return _digest(zip([file.name for file in files], pool.map(_checksum, files), strict=True))


def digest_of_contents(contents: Mapping[str, bytes]) -> str:
    """Return the ``digest_of_files`` with these bytes, by name."""
    return _digest((name, xxhash.xxh3_128_hexdigest(each)) for name, each in contents.items())


def _digest(checksums: Iterable[tuple[str, str]]) -> str:
    lines = [f"{name} {checksum}\n" for name, checksum in checksums]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
