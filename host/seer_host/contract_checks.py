"""The check of an object against a Protocol: what keeps it from the contract, in a clause."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from difflib import get_close_matches
from typing import Any

from seer_core.ports.contracts import MARK, implemented

__all__ = ["flaw_of"]

NEAR = 0.82
"""Likeness, by ``difflib``, from which a name is taken for a misspelt one: `complete` for `completed`."""
NEAR_WITH_ARGUMENTS = 0.6
"""The same for methods with the same arguments: `streaming(now, piece)` for `streamed(now, piece)`."""


def flaw_of(thing: object, protocol: type) -> str | None:
    """Return, in a clause, what keeps an object from the contract of ``protocol``; None if nothing does.

    ``thing`` may also be a class; then attributes that only its objects have are not looked for.  A flaw is a
    missing member, a method that cannot be called with the contract's arguments, an async one in place of a
    plain one, or a public method that is nearly called as an optional one, and so would never be called.
    """
    members = dict(_members(protocol))
    if lacking := _lacking(thing, members):
        hints = "".join(
            f"; is {own!r} meant for {name!r}?" for name in lacking for own in _near(name, thing, protocol)
        )
        return f"it lacks {', '.join(lacking)}{hints}"
    for name, member in members.items():
        written = inspect.isfunction(member) and implemented(thing, name) is not None
        if written and (flaw := _call_flaw(thing, name, member)):
            return flaw
    called = {name for name, member in members.items() if not isinstance(member, property)} - {"__len__"}
    absent = [name for name in members if name in called and implemented(thing, name) is None]
    for own in _own_methods(thing, members):
        given = _arguments(thing, own)
        alike = [name for name in absent if given and given == _arguments(protocol, name)]
        plain = own.removeprefix("on_")
        near = get_close_matches(plain, absent, 1, NEAR) or get_close_matches(
            plain, alike, 1, NEAR_WITH_ARGUMENTS
        )
        if near:
            return (
                f"its method {own!r} would never be called; rename it to {near[0]!r}, or begin its name with"
                " an underscore if that is not meant"
            )
    return None


def _members(protocol: type) -> Iterator[tuple[str, Any]]:
    """Yield the public members of a Protocol by name; None for an attribute that is only annotated."""
    seen = set()
    for base in protocol.__mro__[:-1]:
        if base.__module__ == "typing":
            continue
        for name in (*vars(base), *inspect.get_annotations(base)):
            if name not in seen and (name == "__len__" or not name.startswith("_")):
                seen.add(name)
                yield name, vars(base).get(name)


def _open(member: Any) -> bool:
    """Return whether a member may be left out: an optional method, or an attribute with a value."""
    plain = member is None or inspect.isfunction(member) or isinstance(member, property)
    return hasattr(member, MARK) or not plain


def _lacking(thing: object, members: dict[str, Any]) -> list[str]:
    wanted = [name for name, member in members.items() if not _open(member)]
    if isinstance(thing, type):
        wanted = [name for name in wanted if inspect.isfunction(members[name])]
    return sorted(name for name in wanted if _written(thing, name, members[name]) in (None, members[name]))


def _written(thing: object, name: str, member: Any = None) -> Any:
    """Return a member, a method as the function that it is; None if there is none.

    A property stays one where the contract has one: its value may have to be asked of a server.
    """
    kind = thing if isinstance(thing, type) else type(thing)
    static = inspect.getattr_static(kind, name, None)
    if isinstance(static, property) and isinstance(member, property):
        return static
    found = getattr(thing, name, None)
    return getattr(found, "__func__", True if found is None and hasattr(thing, name) else found)


def _near(name: str, thing: object, protocol: type) -> list[str]:
    """Return the author's method, if there is one, whose name or arguments are nearly the contract's."""
    own = _own_methods(thing, dict(_members(protocol)))
    given = _arguments(protocol, name)
    alike = [each for each in own if given and given == _arguments(thing, each)]
    return get_close_matches(name, own, 1, NEAR) or get_close_matches(name, alike, 1, NEAR_WITH_ARGUMENTS)


def _own_methods(thing: object, members: dict[str, Any]) -> list[str]:
    """Return the names of the public methods that are none of the contract's."""
    kind = thing if isinstance(thing, type) else type(thing)
    return [
        name
        for name in dir(kind)
        if not name.startswith("_") and name not in members and inspect.isroutine(getattr(kind, name, None))
    ]


def _arguments(thing: object, name: str) -> list[str]:
    """Return the names of a method's arguments, ``self`` left out."""
    kind = thing if isinstance(thing, type) else type(thing)
    method = inspect.getattr_static(kind, name, None)
    return list(inspect.signature(method).parameters)[1:] if inspect.isfunction(method) else []


def _call_flaw(thing: object, name: str, contract: Callable[..., Any]) -> str | None:
    """Return why the method cannot be called as the contract's is."""
    method = getattr(thing, name)
    given = list(inspect.signature(contract).parameters)[1:]
    of_class = isinstance(thing, type) and inspect.isfunction(inspect.getattr_static(thing, name))
    try:
        signature = inspect.signature(method)
    except (TypeError, ValueError):  # of a builtin, or no method at all
        return None if callable(method) else f"its {name!r} is no method"
    try:
        signature.bind(*([thing] if of_class else []), *given)
    except TypeError as error:
        arguments = ", ".join(given) or "no argument"
        return f"its method {name!r} cannot be called with {arguments}: {error}"
    if inspect.iscoroutinefunction(method) and not inspect.iscoroutinefunction(contract):
        return f"its method {name!r} is async, and would never be awaited; make it a plain one"
    return None
