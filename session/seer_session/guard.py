"""The guard of ``debug``: a plug-in that changes what it was given is named, with the line.

Requests, groups and instances are the scheduler's; strategies may read and keep them.  From the first call on
by which a guarded strategy gets one, it cannot be written to while a strategy is called, whichever of its
methods has kept it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextvars import ContextVar
from typing import Any

import attrs
import msgspec

from seer_core.error_origin import place_of
from seer_core.errors import PluginError
from seer_core.model import GroupContext, InstanceStatus, Request
from seer_core.plugins.slots import Strategies
from seer_core.ports.contracts import implemented
from seer_core.scheduling.scheduler import Policies, Slot
from seer_session.factories import SLOTS

__all__ = ["MutationGuard", "guarded_policies", "guarded_strategies"]

_changes: ContextVar[list[AttributeError] | None] = ContextVar("changes", default=None)
"""The refused changes of the strategy that is being called; None while none is."""


class _ReadOnly:
    """Refuses changes while a strategy is called; copies are of the plain class, and may be changed."""

    __slots__ = ()

    def __new__(cls, *values: Any, **more: Any) -> Any:
        return _plain(cls)(*values, **more)

    def __reduce__(self) -> tuple[Any, ...]:
        plain = _plain(type(self))
        return plain, tuple(getattr(self, field.name) for field in attrs.fields(plain) if field.init)

    def __setattr__(self, name: str, value: Any) -> None:
        noun = NOUNS[_plain(type(self))]
        _refuse(lambda: f"{name} of {noun} {self.id!r} from {getattr(self, name, None)!r} to {value!r}")  # type: ignore[attr-defined]
        object.__setattr__(self, name, value)


def _refuse(change: Callable[[], str]) -> None:
    """Raise AttributeError while a strategy is called, and keep it for the guard."""
    changes = _changes.get()
    if changes is not None:
        changes.append(AttributeError(change()))
        raise changes[-1]


class _ReadOnlyDict(dict[Any, Any]):
    """A mapping that such an object has, which refuses changes likewise; copies are plain dicts."""

    def __init__(self, values: Any, owner: str) -> None:
        super().__init__(values)
        self.owner = owner

    def __reduce__(self) -> tuple[Any, ...]:
        return dict, (dict(self),)


def _refusing(method: str) -> Any:
    plain = getattr(dict, method)

    def changing(self: _ReadOnlyDict, *arguments: Any, **more: Any) -> Any:
        _refuse(lambda: f"{self.owner} by {method}{arguments!r}")
        return plain(self, *arguments, **more)

    return changing


for _method in ("__setitem__", "__delitem__", "__ior__", "clear", "pop", "popitem", "setdefault", "update"):
    setattr(_ReadOnlyDict, _method, _refusing(_method))


NOUNS: dict[type, str] = {GroupContext: "group", InstanceStatus: "instance", Request: "request"}
READ_ONLY = {each: type(f"_ReadOnly{each.__name__}", (_ReadOnly, each), {"__slots__": ()}) for each in NOUNS}


def _plain(guarded: type) -> type:
    return guarded.__mro__[2]


def _make_read_only(things: Iterable[Any]) -> None:
    """Let no strategy write to the groups, instances and requests among these from now on."""
    for thing in things:
        kind = type(thing)
        if kind is tuple or kind is list:
            _make_read_only(thing)
        if kind not in READ_ONLY:
            continue
        if kind is GroupContext:
            thing.in_flight = _ReadOnlyDict(thing.in_flight, f"in_flight of group {thing.id!r}")
            thing.labels = _ReadOnlyDict(thing.labels, f"labels of group {thing.id!r}")
        elif kind is InstanceStatus:
            labels = _ReadOnlyDict(thing.info.labels, f"info.labels of instance {thing.id!r}")
            thing.info = msgspec.structs.replace(thing.info, labels=labels)
        else:
            _make_read_only([thing.group])
        thing.__class__ = READ_ONLY[kind]


class MutationGuard:
    """A strategy that cannot change guarded objects; it fills these ``slots``, whose names errors have."""

    def __init__(self, owner: str, slots: list[str], strategy: Any) -> None:
        self.owner = owner
        self.slots = slots
        self.strategy = strategy
        self.__module__ = type(strategy).__module__  # by which errors find the line of its author

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.strategy, name)
        if not callable(found) or implemented(self.strategy, name) is None:
            return found
        return lambda *arguments: self._call(name, *arguments)

    def __len__(self) -> int:
        return int(self._call("__len__"))

    def _call(self, name: str, *arguments: Any) -> Any:
        _make_read_only(arguments)
        changes: list[AttributeError] = []
        before = _changes.set(changes)
        try:
            return getattr(self.strategy, name)(*arguments)
        finally:
            _changes.reset(before)
            if changes:  # also if the plug-in has caught the error
                slot = next((slot for slot in self.slots if name in vars(SLOTS[slot])), self.slots[0])
                raise PluginError(
                    f"plug-in {self.owner!r}, slot {slot!r}: {name}() changed what it was given:"
                    f" {changes[0]} at {place_of(changes[0], self.strategy)};"
                    " these objects are the scheduler's, so change a copy"
                )


def guarded_policies(policies: Policies) -> Policies:
    """Return the same, unable to change what they are given."""
    return guarded_strategies(Strategies(policies)).policies


def guarded_strategies(strategies: Strategies) -> Strategies:
    """Return the same, of which policies and observers are unable to change what they are given."""
    guards: dict[int, MutationGuard] = {}

    def guarded(slot: Slot[Any]) -> Slot[Any]:
        guard = guards.setdefault(id(slot.strategy), MutationGuard(slot.owner, [], slot.strategy))
        guard.slots.append(slot.name)
        return Slot(slot.name, slot.owner, guard, slot.inner and guarded(slot.inner))

    policies = strategies.policies
    return attrs.evolve(
        strategies,
        policies=Policies(
            guarded(policies.splitter), guarded(policies.prioritizer), guarded(policies.placer)
        ),
        observers=tuple(guarded(slot) for slot in strategies.observers),
    )
