"""Functions that a config names: ``FILE.py:FUNCTION`` or ``package.module:FUNCTION``."""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

from seer_core.error_origin import describe_error, is_ctrl_c
from seer_core.errors import SHOWN, ConfigError, printable, quote

__all__ = ["resolve"]


def resolve(key: str, reference: str, base_dir: Path) -> Callable[..., Any]:
    """Import the function or class that a reference, the value of ``key``, names.

    A file is relative to ``base_dir``, and may import its neighbours.

    Raises:
        ConfigError: there is none, or it cannot be imported or called.
    """
    place, _, name = reference.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError(
            f"{key}: {quote(reference)} names no function; write FILE.py:FUNCTION or package.module:FUNCTION"
        )
    if place.endswith(".py") and not os.path.isfile(base_dir / place):
        file = printable(str(base_dir / place), SHOWN)
        raise ConfigError(
            f"{key}: {quote(reference)} names the file {file}, which is not there; mend the path"
        )
    try:
        module = _of_file(base_dir / place) if place.endswith(".py") else importlib.import_module(place)
        found = getattr(module, name)
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise ConfigError(
            f"{key}: {quote(reference)} cannot be imported: {describe_error(error, place)}"
        ) from error
    if not callable(found):
        raise ConfigError(f"{key}: {quote(reference)} is no function")
    return found  # type: ignore[no-any-return]


def _of_file(file: Path) -> ModuleType:
    """Import a file under its path, so that no module of the same name is in its way."""
    file = file.resolve()
    if str(file) not in sys.modules:
        spec = importlib.util.spec_from_file_location(str(file), file)
        assert spec is not None
        assert spec.loader is not None
        if str(file.parent) not in sys.path:
            sys.path.append(str(file.parent))
        module = sys.modules[str(file)] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except BaseException:
            del sys.modules[str(file)]
            raise
    return sys.modules[str(file)]
