"""Checks before a picture is drawn: the form of its file, and whether matplotlib is here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from seer_core.errors import ConfigError

__all__ = ["importing_to_draw"]


@contextmanager
def importing_to_draw(path: Path | None, option: str, what: str) -> Iterator[None]:
    """Import in this block the code that draws ``path``, which ``option`` names, for ``what``.

    Raises:
        ConfigError: matplotlib is missing, or cannot write such files.
    """
    if path is not None and path.suffix not in (".svg", ".png"):
        raise ConfigError(f"{option} {path}: name a .svg or a .png file")
    try:
        yield
    except ImportError as error:
        raise ConfigError(f"{what} needs matplotlib ({error}); run `pip install matplotlib`") from error
