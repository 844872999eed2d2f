"""What a plug-in names by ``package.module:Class`` for an engine's process: imported, checked, made."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Generic, TypeVar

import attrs
import structlog

from seer_core.errors import EngineError

__all__ = ["Kind"]

log = structlog.get_logger("seer")

T = TypeVar("T")


@attrs.frozen
class Kind(Generic[T]):
    """Classes that satisfy ``protocol``; errors call one a ``name`` and end with the ``remedy``."""

    name: str
    protocol: Any
    remedy: str

    def load(self, path: str) -> type[T]:
        """Import ``package.module:Class``.

        Raises:
            EngineError: it cannot be imported, or is no class with the methods of the protocol.
        """
        module_name, _, name = path.partition(":")
        try:
            found: type[T] = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise EngineError(f"{self.name} {path!r} cannot be imported: {error}; {self.remedy}") from error
        methods = [
            each for each, _ in inspect.getmembers(self.protocol, inspect.isfunction) if each[0] != "_"
        ]
        missing = [each for each in methods if not callable(getattr(found, each, None))]
        if not isinstance(found, type) or missing:
            lacks = f"without {', '.join(missing)}" if missing else "an object, not a class"
            raise EngineError(f"{self.name} {path!r} is no {self.protocol.__name__}: {lacks}; {self.remedy}")
        return found

    def make(self, path: str, *arguments: Any) -> T:
        """Make one; an ``EngineError`` of its own passes as it is.

        Raises:
            EngineError: it cannot be loaded, or cannot be made here.
        """
        found = self.load(path)
        try:
            return found(*arguments)
        except EngineError:
            raise
        except Exception as error:
            log.exception("cannot_be_made", what=self.name, path=path)
            raise EngineError(
                f"{self.name} {path!r} cannot be made: {type(error).__name__}: {error}; {self.remedy}"
            ) from error
