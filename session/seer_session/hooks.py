"""The hooks of plug-ins: read off their modules, checked, and called by pluggy."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from traceback import walk_tb
from typing import Any

import attrs
import pluggy
import structlog
from seer_host.tables import nearest

from seer_core.error_origin import one_line, shown
from seer_core.errors import PluginError
from seer_core.plugins import hookspecs
from seer_core.plugins.hookspecs import PROJECT
from seer_session import hookspecs as session_hookspecs

__all__ = ["DECLARED", "FACTORY", "HOOKS", "Plugin", "SeerPluginManager", "read_hooks"]

log = structlog.get_logger("seer")

FACTORY = "seer_make_"
"""How the name of a slot's hook begins."""

LAST = ("seer_make_observer", "seer_doctor")


def _declared() -> dict[str, Callable[..., Any]]:
    """Return the declaration of each hook by its name, in the order of the calls."""
    found = {**vars(hookspecs), **vars(session_hookspecs)}
    names = [name for name in found if name.startswith("seer_")]
    names.sort(key=lambda name: (name != "seer_make_launcher", name in LAST))
    return {name: found[name] for name in names}


DECLARED = _declared()
"""Every hook's declaration, in the order of the calls."""

HOOKS = {hook.removeprefix("seer_").removeprefix("make_"): hook for hook in DECLARED}
"""What a plug-in may implement, ``doctor`` or a slot, to the name of the hook; in the order of the calls."""

Function = Callable[..., Any]

options_of = pluggy.PluginManager(PROJECT).parse_hookimpl_opts
"""Returns the options of the marker at an attribute, or None where there is no marker."""


@attrs.frozen(eq=False)
class Plugin:
    """A loaded plug-in: its name in the config, its module, its checked settings, and its hooks by slot.

    ``hooks`` has the functions that answer the hook of a slot; none where the plug-in only wraps it.
    """

    name: str
    module: str
    namespace: Any
    settings: Any
    hooks: Mapping[str, tuple[Function, ...]]

    def asks(self, slot: str, argument: str) -> bool:
        """Return whether its hook for a slot asks for an argument."""
        return any(argument in inspect.signature(each).parameters for each in self.hooks[slot])


class SeerPluginManager(pluggy.PluginManager):
    """pluggy's manager of one run's plug-ins, which calls a hook for one plug-in at a time.

    So each call has the settings of the plug-in that answers.  The wrappers of all go round it.
    """

    def __init__(
        self, plugins: Sequence[Plugin], blocked: Iterable[str] = (), *, debug: bool = False
    ) -> None:
        """Register plug-ins, so that pluggy calls them in this order, and no plug-in that is ``blocked``.

        With ``debug`` each call of a hook is logged.

        Raises:
            PluginError: pluggy refuses a hook, or an object in place of a module that equals another one.
        """
        super().__init__(PROJECT)
        self.add_hookspecs(hookspecs)
        self.add_hookspecs(session_hookspecs)
        if debug:
            self.trace.root.setwriter(lambda text: log.info("pluggy", trace=one_line(text)))
            self.enable_tracing()
        for name in {*blocked} - {plugin.name for plugin in plugins}:
            self.set_blocked(name)
        for plugin in reversed(plugins):  # pluggy calls first what was registered last
            try:
                if plugin.namespace not in self.get_plugins():
                    self.register(plugin.namespace, plugin.name)
            except (pluggy.PluginValidationError, TypeError) as error:
                raise PluginError(f"pluggy refuses plug-in {plugin.name!r}: {one_line(error)}") from error

    def answering(self, slot: str, plugins: Iterable[Plugin]) -> list[Plugin]:
        """Return the plug-ins that answer the hook of a slot, in the order in which pluggy calls them."""
        order = [impl.plugin for impl in reversed(getattr(self.hook, HOOKS[slot]).get_hookimpls())]
        answering = (plugin for plugin in plugins if plugin.hooks.get(slot))
        return sorted(answering, key=lambda plugin: order.index(plugin.namespace))

    def call(self, plugin: Plugin, slot: str, made: list[Any] | None = None, **arguments: Any) -> list[Any]:
        """Call the hook of one plug-in, wrappers included, and return its answers.

        With ``made``, its answers to an earlier call, its own functions are not called.

        Raises:
            PluginError: a wrapper returned something else.
        """
        self.trace("plug-in", plugin.name)
        if made is None:
            answers = self._caller(plugin.namespace, slot)(**arguments)
        else:
            extra = [partial(list.__getitem__, made, at) for at in reversed(range(len(made)))]
            answers = self._caller(None, slot).call_extra(extra, arguments)
        if isinstance(answers, list):
            return answers
        wrappers = " and ".join(repr(impl.plugin_name) for impl in self._caller(None, slot).get_hookimpls())
        raise PluginError(
            f"hook {HOOKS[slot]!r}, which {wrappers} wraps, returned {shown(answers)}; let the wrapper return"
            " the list that its `yield` gives"
        )

    def who_raised(self, plugin: Plugin, slot: str, error: BaseException) -> tuple[str, str]:
        """Return the name and module of the plug-in whose hook raised an error in a call for ``plugin``."""
        impls = {
            getattr(impl.function, "__code__", None): impl
            for impl in self._caller(plugin.namespace, slot).get_hookimpls()
        }
        raising = [impls[frame.f_code] for frame, _ in walk_tb(error.__traceback__) if frame.f_code in impls]
        if raising and raising[-1].plugin != plugin.namespace:
            return raising[-1].plugin_name, raising[-1].function.__module__
        return plugin.name, plugin.module

    def _caller(self, namespace: Any, slot: str) -> pluggy.HookCaller:
        """Return what calls one plug-in's hook, if it has any, and the wrappers of all."""
        impls = getattr(self.hook, HOOKS[slot]).get_hookimpls()
        answering = {impl.plugin for impl in impls if not (impl.wrapper or impl.hookwrapper)}
        return self.subset_hook_caller(HOOKS[slot], answering - {namespace})


def read_hooks(name: str, namespace: Any) -> dict[str, tuple[Function, ...]]:
    """Return the functions of a plug-in's module or object that answer hooks, by slot.

    A slot whose hook it only wraps has none.

    Raises:
        PluginError: it implements none, or one that is not as it must be.
    """
    slots = {hook: slot for slot, hook in HOOKS.items()}
    answers: dict[str, list[Function]] = {}
    wrapped: dict[str, list[Function]] = {}
    marked = False
    for attribute in dir(namespace):
        if options := options_of(namespace, attribute):
            marked = True
            hook, function = options["specname"] or attribute, getattr(namespace, attribute)
            if hook in slots or not options["optionalhook"]:
                _check_hook(name, hook, function)
                into = wrapped if options["wrapper"] or options["hookwrapper"] else answers
                into.setdefault(slots[hook], []).append(function)
        elif attribute.startswith((FACTORY, "seer_doctor")):
            raise PluginError(
                f"plug-in {name!r}: {attribute!r} is not marked as a hook; decorate it with"
                " @seer_core.plugins.hookspecs.hookimpl"
            )
    if not marked:
        raise PluginError(
            f"plug-in {name!r} implements no hook; mark its factories with"
            " @seer_core.plugins.hookspecs.hookimpl"
        )
    for slot in answers.keys() & wrapped.keys():
        raise PluginError(
            f"plug-in {name!r} answers hook {HOOKS[slot]!r} and wraps it, too; put the wrapper into a plug-in"
            " of its own"
        )
    return {slot: tuple(answers.get(slot, ())) for slot in HOOKS if slot in answers or slot in wrapped}


def _check_hook(name: str, hook: str, function: Any) -> None:
    """Refuse what is marked as a hook and is none of ours, or could not be called as one."""
    if hook not in HOOKS.values():
        raise PluginError(f"plug-in {name!r}: there is no hook {hook!r}{nearest(hook, HOOKS.values())}")
    if inspect.iscoroutinefunction(function) or inspect.isasyncgenfunction(function):
        raise PluginError(
            f"plug-in {name!r}: hook {hook!r} is async; make it a plain function, and let what it returns"
            " wait in its `start`"
        )
    known = list(inspect.signature(DECLARED[hook]).parameters)
    for argument in inspect.signature(function).parameters:
        if argument not in known:
            raise PluginError(
                f"plug-in {name!r}: hook {hook!r} asks for {argument!r}; it may ask for"
                f" {', '.join(known[:-1])} and {known[-1]} only"
            )
