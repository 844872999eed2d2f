"""Names inside an engine that its backend relies on, though the engine promises none of them.

A backend lists them in one file and looks for them when a worker starts, so that another version of the
engine is refused with one sentence, instead of giving a wrong token.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterable
from operator import attrgetter
from typing import Any

import attrs

from seer_core.errors import EngineError

__all__ = ["Name", "complain", "flaw_of", "lacking"]


@attrs.frozen
class Name:
    """A name, dotted where it is an attribute's; ``owner`` is the module, or ``module:Class``, that has it.

    ``takes`` are the parameters with which it is called, or with which the engine calls what we put in its
    place; None where it is not a function.
    """

    owner: str
    name: str
    without: str
    takes: tuple[str, ...] | None = None


def complain(engine: str, flaws: Iterable[str]) -> None:
    """Refuse an engine that has flaws.

    Raises:
        EngineError: naming all of them.
    """
    found = list(flaws)
    if found:
        raise EngineError(f"this {engine} will not do: {'; '.join(found)}")


def lacking(thing: Any, names: Iterable[Name]) -> list[str]:
    """Return which of these attributes a live object lacks."""
    flaws = []
    for name in names:
        try:
            attrgetter(name.name)(thing)
        except AttributeError:
            flaws.append(f"{name.owner} has no {name.name}, and without it {name.without}")
    return flaws


def flaw_of(name: Name) -> str | None:
    """Return what is wrong with a name of a module or a class, if it is not there as described."""
    module, _, kind = name.owner.partition(":")
    try:
        owner: Any = importlib.import_module(module)
        owner = getattr(owner, kind) if kind else owner
    except (ImportError, AttributeError):
        return f"there is no {name.owner}, and without its {name.name} {name.without}"
    annotated = inspect.isclass(owner) and any(
        name.name in vars(each).get("__annotations__", {}) for each in owner.__mro__
    )
    if not annotated and not hasattr(owner, name.name):
        return f"{name.owner} has no {name.name}, and without it {name.without}"
    if name.takes is not None:
        taken = tuple(inspect.signature(getattr(owner, name.name)).parameters)
        if taken[: len(name.takes)] != name.takes:
            takes, wanted = ", ".join(taken), ", ".join(name.takes)
            return f"{name.owner}.{name.name} takes ({takes}), not ({wanted}), and then {name.without}"
    return None
