"""The hooks of a plug-in: read off its module, and checked."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import attrs
import pluggy

from seer_core.error_origin import one_line
from seer_core.errors import PluginError
from seer_core.plugins import hookspecs
from seer_core.plugins.config import nearest
from seer_core.plugins.hookspecs import PROJECT

__all__ = ["HOOKS", "Hook", "read_hooks"]

FACTORY = "seer_make_"
HOOKS = {
    name.removeprefix(FACTORY) if name.startswith(FACTORY) else name.removeprefix("seer_"): name
    for name in vars(hookspecs)
    if name.startswith("seer_")
}
"""What a plug-in may implement, ``doctor`` or a slot, to the name of the hook; in the order of the calls."""


@attrs.frozen
class Hook:
    """A plug-in's function for a hook, and those of our arguments that it asks for."""

    function: Callable[..., Any]
    accepts: tuple[str, ...]

    def __call__(self, **arguments: Any) -> Any:
        """Call it as pluggy does: with what it asks for."""
        return self.function(**{name: arguments[name] for name in self.accepts})


def read_hooks(name: str, namespace: Any) -> dict[str, Hook]:
    """Return the hooks that a plug-in's module or object implements, by slot.

    Raises:
        PluginError: it implements none, or one that is not as it must be.
    """
    manager = pluggy.PluginManager(PROJECT)
    manager.add_hookspecs(hookspecs)
    for attribute in dir(namespace):
        if manager.parse_hookimpl_opts(namespace, attribute) is not None:
            _check_hook(name, attribute, getattr(namespace, attribute))
        elif attribute.startswith((FACTORY, "seer_doctor")):
            raise PluginError(
                f"plug-in {name!r}: {attribute!r} is not marked as a hook; decorate it with"
                " @seer_core.plugins.hookspecs.hookimpl"
            )
    try:
        manager.register(namespace, name)
        manager.check_pending()
    except pluggy.PluginValidationError as error:
        raise PluginError(
            f"plug-in {name!r} has a hook that fits no slot: {one_line(error)};"
            f" hooks: {', '.join(HOOKS.values())}"
        ) from error
    hooks: dict[str, Hook] = {}
    for slot, hook in HOOKS.items():
        for impl in getattr(manager.hook, hook).get_hookimpls():
            hooks[slot] = Hook(impl.function, tuple(impl.argnames))
    if not hooks:
        raise PluginError(
            f"plug-in {name!r} implements no hook; mark its factories with"
            " @seer_core.plugins.hookspecs.hookimpl"
        )
    return hooks


def _check_hook(name: str, hook: str, function: Any) -> None:
    """Refuse what is marked as a hook and is none of ours, or could not be called as one."""
    if hook not in HOOKS.values():
        raise PluginError(f"plug-in {name!r}: there is no hook {hook!r}{nearest(hook, HOOKS.values())}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(
            f"plug-in {name!r}: hook {hook!r} is async; make it a plain function, and let what it returns"
            " wait in its `start`"
        )
    known = list(inspect.signature(getattr(hookspecs, hook)).parameters)
    for argument in inspect.signature(function).parameters:
        if argument not in known:
            raise PluginError(
                f"plug-in {name!r}: hook {hook!r} asks for {argument!r}; it may ask for"
                f" {', '.join(known[:-1])} and {known[-1]} only"
            )
