"""Slots: which strategy fills each, and how plug-ins are asked for it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, get_args, get_type_hints

from seer_host.contract_checks import flaw_of
from seer_host.launcher import Launcher
from seer_host.tables import SlotsTable, nearest

from seer_core.error_origin import describe_error, is_interruption, is_sentence
from seer_core.errors import ConfigError, PluginError, quote
from seer_core.plugins.hookspecs import Startup
from seer_core.plugins.slots import Strategies
from seer_core.scheduling.scheduler import CORE, Policies, Slot, remedy_without
from seer_session.environment import Environment
from seer_session.hooks import DECLARED, FACTORY, HOOKS, Plugin, SeerPluginManager

__all__ = ["SLOTS", "Factories", "check_enabled", "environment_of", "fill"]

SLOTS: Mapping[str, type] = {
    slot: get_args(get_type_hints(DECLARED[hook])["return"])[0]
    for slot, hook in HOOKS.items()
    if hook.startswith(FACTORY)
}
"""Slot name to the Protocol its strategy satisfies, by what the declaration of its hook returns."""

INNER = "inner"
"""The argument by which a hook asks for the strategy that its own is to wrap."""


class Factories:
    """Calls the plug-ins' factory hooks, each function once.

    A function that stands under the names of several hooks fills all of these slots with one object.
    """

    def __init__(self, manager: SeerPluginManager, startup: Startup) -> None:
        self.manager = manager
        self.launcher: Launcher | None = None
        self._startup = startup
        self._made: dict[tuple[Plugin, Any], list[Any]] = {}

    def make(self, plugin: Plugin, slot: str, inner: Slot[Any] | None = None) -> Slot[Any] | None:
        """Return a plug-in's strategy, wrapped around ``inner`` if its hook asks for that; None: it abstains.

        Raises:
            PluginError: the factory raised, or returned something its slot does not take.
        """
        made = self.make_all(plugin, slot, inner)
        if len(made) > 1:
            raise PluginError(
                f"plug-in {plugin.name!r} answered hook 'seer_make_{slot}' with {len(made)} strategies; let"
                " it return one"
            )
        return made[0] if made else None

    def make_all(self, plugin: Plugin, slot: str, inner: Slot[Any] | None = None) -> list[Slot[Any]]:
        """Return all strategies of a plug-in for a slot that several may fill; otherwise as ``make``."""
        wraps = plugin.asks(slot, INNER)
        key = (plugin, plugin.hooks[slot])
        try:
            strategies = self._made[key] = self.manager.call(
                plugin,
                slot,
                None if wraps else self._made.get(key),
                settings=plugin.settings,
                startup=self._startup,
                launcher=self.launcher,
                inner=None if inner is None else inner.strategy,
            )
        except BaseException as error:
            if is_sentence(error) or is_interruption(error):
                raise
            name, module = self.manager.who_raised(plugin, slot, error)
            raise PluginError(
                f"plug-in {name!r} raised in hook 'seer_make_{slot}': {describe_error(error, module)};"
                f" {remedy_without(slot, name)}"
            ) from error
        for strategy in strategies:
            _check_type(plugin.name, slot, strategy)
        return [Slot(slot, plugin.name, strategy, inner if wraps else None) for strategy in strategies]


def fill(chosen: SlotsTable, plugins: Sequence[Plugin], factories: Factories) -> Strategies:
    """Call the factory hooks of these plug-ins and return the filled slots.

    Raises:
        ConfigError: a slot has two owners, or ``chosen`` names what cannot fill one.
        PluginError: see ``Factories.make``.
    """
    chains = {slot: chosen.chain(slot) for slot in SlotsTable.__struct_fields__}
    offers = {
        slot: {plugin.name: plugin for plugin in factories.manager.answering(slot, plugins)}
        for slot in chains
    }
    check_enabled(chosen, [plugin.name for plugin in plugins])
    for slot, names in chains.items():
        _check_chain(names, slot, offers[slot])
    filled = {
        slot: _named(names, slot, offers[slot], factories) if names else _only(slot, offers[slot], factories)
        for slot, names in chains.items()
    }
    watching = factories.manager.answering("observer", plugins)
    observers = tuple(each for plugin in watching for each in factories.make_all(plugin, "observer"))
    drafter, environment = filled.pop("drafter"), filled.pop("environment")
    return Strategies(
        Policies(**{slot: each for slot, each in filled.items() if each is not None}),
        observers,
        drafter,
        () if environment is None else (environment,),
        passed_over={
            slot: tuple(name for name in offers[slot] if name not in names)
            for slot, names in chains.items()
            if names
        },
    )


def environment_of(strategies: Strategies) -> Slot[Environment] | None:
    """Return what answers the turns of responses, if a plug-in does."""
    return next((slot for slot in strategies.others if slot.name == "environment"), None)


def check_enabled(chosen: SlotsTable, enabled: Sequence[str]) -> None:
    """Raise ConfigError where a name in ``[seer.slots]`` is none of the enabled plug-ins'."""
    for slot in SlotsTable.__struct_fields__:
        for name in chosen.chain(slot):
            if name != CORE and name not in enabled:
                raise ConfigError(
                    f"[seer.slots].{slot} names {quote(name)}, which is not in [seer].plugins"
                    f"{nearest(name, [*enabled, CORE])}"
                )


def _check_chain(names: Sequence[str], slot: str, offering: Mapping[str, Plugin]) -> None:
    """Refuse a name that offers nothing for its slot, and one before others that wraps none."""
    for name in names:
        if name != CORE and name not in offering:
            hint = nearest(name, [*offering, CORE])
            raise ConfigError(f"[seer.slots].{slot} names {quote(name)}, which offers none{hint}")
    for name in names[:-1]:
        if name == CORE or not offering[name].asks(slot, INNER):
            raise ConfigError(f"[seer.slots].{slot}: {name!r} wraps no other; name it last, or alone")


def _only(slot: str, offering: Mapping[str, Plugin], factories: Factories) -> Slot[Any] | None:
    """Return the strategy of the only plug-in that offers one."""
    inner = getattr(Policies(), slot, None)
    made = [factories.make(plugin, slot, inner) for plugin in offering.values()]
    answers = [answer for answer in made if answer is not None]
    if len(answers) > 1:
        names = " and ".join(repr(answer.owner) for answer in answers)
        raise ConfigError(
            f"slot {slot!r} is claimed by {names}; keep one in [seer].plugins, or say which fills it:"
            f" [seer.slots] {slot} = {answers[-1].owner!r}"
        )
    return answers[0] if answers else None


def _named(
    names: Sequence[str], slot: str, offering: Mapping[str, Plugin], factories: Factories
) -> Slot[Any] | None:
    """Return the strategies of the named plug-ins, each wrapped around the next."""
    filled: Slot[Any] | None = getattr(Policies(), slot, None)  # what the core does
    for name in reversed(names):
        if name == CORE:
            continue
        filled = factories.make(offering[name], slot, filled)
        if filled is None:
            raise ConfigError(
                f"[seer.slots].{slot} names {name!r}, which abstains as it is configured; name another"
            )
    return filled


def _check_type(name: str, slot: str, strategy: Any) -> None:
    answer, protocol = f"plug-in {name!r} answered hook 'seer_make_{slot}' with", SLOTS[slot]
    if isinstance(strategy, type):
        raise PluginError(f"{answer} the class {strategy.__name__}; return an object of it")
    if flaw := flaw_of(strategy, protocol):
        raise PluginError(f"{answer} a {type(strategy).__name__}, which is no {protocol.__name__}: {flaw}")
