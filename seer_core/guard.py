"""What ``debug`` adds to a scheduler: whoever changes what he was given is told so, where he does it.

Requests, groups and instances are the scheduler's; strategies may read and keep them.  Under guard they are
objects of classes that refuse to be written to while a strategy is asked.  So a change is found in the line
that makes it, whichever method that is in, and costs nothing where nobody guards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextvars import ContextVar
from typing import Any

import attrs

from seer_core.errors import PluginError
from seer_core.model import GroupContext, InstanceStatus, Request

__all__ = ["Watched", "guard"]


@attrs.define(eq=False)
class Call:
    """A call of a plug-in's method, and the first change that it made."""

    owner: str
    slot: str
    method: str
    offence: PluginError | None = None

    def changes(self, thing: Any, noun: str, name: str, value: Any) -> PluginError:
        """Take note of a change, made by the caller's caller, and return the error for it."""
        frame = sys._getframe(2)
        error = PluginError(
            f"plug-in {self.owner!r}, slot {self.slot!r}: {self.method}() changed what it was given:"
            f" {name} of {noun} {thing.id!r} from {getattr(thing, name, None)!r} to {value!r}"
            f" at {frame.f_code.co_filename}:{frame.f_lineno};"
            " these objects are the scheduler's, so change a copy"
        )
        self.offence = self.offence or error
        return error


_call: ContextVar[Call | None] = ContextVar("call", default=None)


def _guarded(kind: type, noun: str) -> type:
    """Return a subclass of the same layout that cannot be written to while a strategy is asked.

    Copies are of the class itself: they are their maker's.
    """
    names = [field.name for field in attrs.fields(kind) if field.init]

    def new(cls: type, *values: Any, **more: Any) -> Any:
        return kind(*values, **more)

    def reduce(self: Any) -> tuple[type, tuple[Any, ...]]:
        return kind, tuple(getattr(self, name) for name in names)

    def write(self: Any, name: str, value: Any) -> None:
        call = _call.get()
        if call is not None:
            raise call.changes(self, noun, name, value)
        object.__setattr__(self, name, value)

    methods = {"__slots__": (), "__new__": new, "__reduce__": reduce, "__setattr__": write}
    return type(kind.__name__, (kind,), methods)


GUARDED = {
    kind: _guarded(kind, noun)
    for kind, noun in ((GroupContext, "group"), (InstanceStatus, "instance"), (Request, "request"))
}


def guard(*things: GroupContext | InstanceStatus | Request) -> None:
    """Let nobody who is asked write to these objects from now on."""
    for thing in things:
        thing.__class__ = GUARDED[type(thing)]


class Watched:
    """A strategy during whose calls guarded objects cannot be changed; it passes for the strategy itself."""

    def __init__(self, owner: str, slot: str, strategy: Any) -> None:
        self.owner = owner
        self.slot = slot
        self.strategy = strategy

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        return type(self.strategy)

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.strategy, name)
        return self._watch(name, found) if callable(found) else found

    def __len__(self) -> int:
        return int(self._watch("__len__", self.strategy.__len__)())

    def _watch(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def called(*arguments: Any) -> Any:
            call = Call(self.owner, self.slot, name)
            before = _call.set(call)
            try:
                return method(*arguments)
            finally:
                _call.reset(before)
                if call.offence is not None:  # even if the plug-in has caught it
                    raise call.offence

        return called
