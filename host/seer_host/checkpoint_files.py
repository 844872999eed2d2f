"""The files of a directory that hold tensors, their digest, and the mark of a copy."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import xxhash

__all__ = ["NONCE", "digest_of_files", "weight_files"]

PATTERNS = ("*.safetensors", "*.safetensors.index.json")
NONCE = "seer-nonce"
"""The file of a copy with a number used once, by which another machine sees that it has the same files."""


def weight_files(directory: Path) -> list[Path]:
    """Return the safetensors of a directory, and their index, in order of names of each kind."""
    return sorted(path for pattern in PATTERNS for path in directory.glob(pattern) if path.is_file())


def digest_of_files(files: Sequence[Path]) -> str:
    """Return a digest over names and bytes, 32 hexadecimal digits."""
    with ThreadPoolExecutor() as pool:
        lines = [
            f"{file.name} {checksum}\n"
            for file, checksum in zip(files, pool.map(_checksum, files), strict=True)
        ]
    return hashlib.sha256("".join(lines).encode()).hexdigest()[:32]


def _checksum(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, xxhash.xxh3_128).hexdigest()
