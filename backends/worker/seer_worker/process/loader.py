"""Classes that a plug-in names as ``package.module:Class`` for workers: imported, checked, made."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

import attrs
import structlog
from seer_host.contract_checks import flaw_of

from seer_core.errors import EngineError

__all__ = ["ImportedClass"]

log = structlog.get_logger("seer")

T = TypeVar("T")


@attrs.frozen
class ImportedClass(Generic[T]):
    """Classes that satisfy ``protocol``; errors call one a ``name`` and end with the ``remedy``.

    ``built_in`` maps short names to the import paths of the classes that come with this package.
    """

    name: str
    protocol: Any
    remedy: str
    built_in: Mapping[str, str] = attrs.Factory(dict)

    def load(self, path: str) -> type[T]:
        """Import ``package.module:Class``, or the class of a short name.

        Raises:
            EngineError: it cannot be imported, or is no class as the protocol describes it.
        """
        module_name, _, name = self.built_in.get(path, path).partition(":")
        try:
            found: type[T] = getattr(importlib.import_module(module_name), name)
        except (ImportError, AttributeError, ValueError) as error:
            raise EngineError(f"{self.name} {path!r} cannot be imported: {error}; {self.remedy}") from error
        is_class = isinstance(found, type)
        flaw = flaw_of(found, self.protocol) if is_class else "it is an object, not a class"
        if flaw:
            raise EngineError(f"{self.name} {path!r} is no {self.protocol.__name__}: {flaw}; {self.remedy}")
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
