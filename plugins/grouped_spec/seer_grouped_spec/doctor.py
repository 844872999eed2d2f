"""The check of the compiled index: it loads, and was built from the source as it is."""

from __future__ import annotations

from hashlib import sha256
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from seer_host.installation import how_to_install

from seer_core.plugins.hookspecs import Check

__all__ = ["compiled_index", "source_digest"]

PART = "grouped_spec"
SOURCE = Path(__file__).parents[1] / "src"
REBUILD = how_to_install("", "`make setup`", again=True)


def compiled_index(source: Path = SOURCE) -> Check:
    """Load the index, and compare it with the version that is installed and the source, if that is here."""
    try:
        index = import_module("seer_grouped_spec._index")
    except ImportError as error:  # not built, or for another Python or numpy
        return Check(PART, False, f"the compiled index cannot be loaded: {error}", REBUILD)
    installed = _version("seer-grouped-spec")
    if installed != index.VERSION:
        return Check(
            PART,
            False,
            f"the compiled index is of version {index.VERSION}, the package of {installed}",
            REBUILD,
        )
    if (source / "index.hpp").is_file() and source_digest(source) != index.SOURCE_DIGEST:
        return Check(PART, False, f"the compiled index is older than {source}", REBUILD)
    return Check(PART, True, f"compiled index {index.VERSION}", "")


def source_digest(source: Path) -> str:
    """Return the digest that ``CMakeLists.txt`` compiles in: of the digests of all files but the fuzzer."""
    files = sorted(path for path in source.glob("*.[ch]pp") if path.name != "fuzz.cpp")
    return sha256("".join(sha256(path.read_bytes()).hexdigest() for path in files).encode()).hexdigest()


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
