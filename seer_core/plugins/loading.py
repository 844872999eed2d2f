"""Plug-ins: discover what is installed, load only what the config names, fill the slots."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from difflib import get_close_matches
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

import attrs
from msgspec import Struct

from seer_core.error_origin import describe_error
from seer_core.errors import ConfigError, PluginError, printable, quote
from seer_core.installation import PLUGINS, how_to_get_plugin
from seer_core.model.sampling import Sampling, SamplingChoice
from seer_core.plugins.config import LONGEST_NAME, Config, nearest, structure
from seer_core.plugins.hooks import HOOKS, read_hooks
from seer_core.plugins.hookspecs import PROJECT, Startup
from seer_core.plugins.merge_fleets import merge_fleets
from seer_core.plugins.slots import SLOTS, Factories, Plugin, Strategies, fill
from seer_core.ports.contracts import flaw_of
from seer_core.ports.engine import EngineFleet, InstanceClient
from seer_core.ports.kv import KVPool
from seer_core.ports.launcher import Launcher
from seer_core.ports.policy import Observer
from seer_core.scheduling.scheduler import CORE, Slot

__all__ = [
    "HOOKS",
    "MADE_BY",
    "SLOTS",
    "Assembly",
    "Plugin",
    "Strategies",
    "assemble",
    "fill_slots",
    "installed",
    "load",
    "load_enabled",
    "startup_of",
    "unknown_plugin",
]

HERE = "local"
"""What ``[seer].launcher`` says where workers are to be child processes."""
NO_POOL = "none"
"""What ``[seer].kv_pool`` says where instances are to share no KV."""

MISSPELT = 0.75
"""How alike two names are, as ``difflib`` counts it, of which one is taken for the other misspelt."""

MADE_BY = {"launcher": "launcher", "engine": "engines", "kv_pool": "kv_pool"}
"""Keys of ``[seer]`` that name plug-ins of their own, and kinds of tables, to the slot these fill."""


class NoSettings(Struct, frozen=True):
    """Settings of a plug-in that has none."""


@attrs.frozen
class Assembly:
    """All slots filled; nothing started."""

    fleet: EngineFleet
    strategies: Strategies
    kv_pool: Slot[KVPool] | None = None
    launcher: Slot[Launcher] | None = None

    def with_observer(self, *observers: Observer, owner: str = "") -> Assembly:
        """Return the same with further observers; see ``Strategies.with_observer``."""
        return attrs.evolve(self, strategies=self.strategies.with_observer(*observers, owner=owner))


def installed() -> dict[str, EntryPoint]:
    """Return every plug-in that an installed distribution offers, by name; imports none."""
    return {point.name: point for point in sorted(_entry_points(), key=lambda each: each.name)}


def _entry_points() -> EntryPoints:
    return _entry_points_on(tuple(sys.path))


@cache
def _entry_points_on(path: tuple[str, ...]) -> EntryPoints:
    """Return our entry points of everything installed on ``path``, read once: 20 ms each time."""
    return entry_points(group=PROJECT)


def unknown_plugin(name: str, where: str) -> ConfigError:
    """Return the error for a name, standing at ``where``, that no installed plug-in has."""
    place = printable(where, 100)
    if remedy := how_to_get_plugin(name):
        return ConfigError(f"{place}: the plug-in {quote(name)} is not installed here; {remedy}")
    return ConfigError(f"{place}: no installed plug-in is called {quote(name)}{nearest(name, installed())}")


def _entry_point(name: str, where: str) -> EntryPoint:
    """Find the one plug-in of that name."""
    points = {point.value: point for point in _entry_points().select(name=name)}
    if not points:
        raise unknown_plugin(name, where)
    if len(points) > 1:
        owners = " and ".join(sorted(_distribution(point) for point in points.values()))
        raise PluginError(f"plug-in name {name!r} is offered by {owners}; uninstall one")
    return points.popitem()[1]


def load(name: str, table: Mapping[str, Any] | None, where: str) -> Plugin:
    """Import a plug-in and check its settings against its ``Settings``; a table of None checks none.

    Raises:
        ConfigError: unknown name, one that stands where its hooks do not belong, or settings that do not fit.
        PluginError: two distributions offer the name, it cannot be imported, or a hook of it is none of
            ours.
    """
    point, kind, hooks = _import(name, where)
    doctor = hooks.pop("doctor", None)
    settings = None
    if table is not None:
        # Before the settings: an error about those would hide that the plug-in stands in the wrong place.
        _check_place(name, hooks, where.partition(".")[0])
        settings = structure(table, kind, where)
    return Plugin(name, point.module, settings, hooks, doctor)


def _import(name: str, where: str) -> tuple[EntryPoint, type[Struct], dict[str, Any]]:
    """Import a plug-in; return its entry point, the class of its settings, and its hooks by slot."""
    point = _entry_point(name, where)
    try:
        namespace = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plug-in {name!r} cannot be imported: {describe_error(error, point.module)};"
            f" mend or reinstall {_distribution(point)}, or run with -p no:{name}"
        ) from error
    kind = getattr(namespace, "Settings", NoSettings)
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        raise PluginError(
            f"plug-in {name!r}: its `Settings` is {quote(kind)}; make it a class of msgspec.Struct"
        )
    return point, kind, dict(read_hooks(name, namespace))


def _check_place(name: str, hooks: Mapping[str, Any], kind: str) -> None:
    """Refuse a plug-in that stands where the config names what makes something else."""
    if kind in MADE_BY and MADE_BY[kind] not in hooks:
        raise _makes_none(name, kind)
    for slot, key, what in (
        ("engines", "engine", "engines"),
        ("kv_pool", "kv_pool", "a KV pool"),
        ("launcher", "launcher", "a launcher"),
    ):
        if kind == "plugin" and set(hooks) == {slot}:
            raise ConfigError(f'{name!r} in [seer].plugins makes {what} only; write {key} = "{name}" instead')


def _makes_none(name: str, kind: str) -> ConfigError:
    """Return the error for a plug-in that ``[seer]`` names in vain for its launcher, engine or KV pool."""
    if kind == "engine":
        return ConfigError(f"plug-in {name!r} makes no engines; [seer].engine must name one that does")
    what, default = ("launcher", HERE) if kind == "launcher" else ("KV pool", NO_POOL)
    return ConfigError(
        f"plug-in {name!r} makes no {what}; [seer].{kind} must name one that does, or {default!r}"
    )


def load_enabled(config: Config) -> list[tuple[str, Plugin]]:
    """Load what a config enables: launcher, engines, KV pool, plug-ins, each with its kind of table."""
    _check_unused_tables(config)
    kv_pool, launcher = _load_kv_pool(config), _load_launcher(config)
    return [
        *([] if launcher is None else [("launcher", launcher)]),
        *(("engine", plugin) for plugin in _load_engines(config)),
        *([] if kv_pool is None else [("kv_pool", kv_pool)]),
        *(("plugin", plugin) for plugin in _load_plugins(config)),
    ]


def _load_engines(config: Config) -> list[Plugin]:
    if not config.seer.engines:
        raise ConfigError(
            "[seer].engine names no engine; write `engine =` with the plug-in that makes the instances, or a"
            " list of several; `seer plugins` lists those installed"
        )
    return [load(name, config.engine.get(name, {}), f"engine.{name}") for name in config.seer.engines]


def _load_kv_pool(config: Config) -> Plugin | None:
    return _load_one("kv_pool", config.seer.kv_pool, NO_POOL, config.kv_pool)


def _load_launcher(config: Config) -> Plugin | None:
    return _load_one("launcher", config.seer.launcher, HERE, config.launcher)


def _load_one(kind: str, name: str, default: str, tables: Mapping[str, Mapping[str, Any]]) -> Plugin | None:
    """Load the plug-in that ``[seer].<kind>`` names; ``default`` names none."""
    if name == default:
        return None
    if name not in installed():
        error = unknown_plugin(name, f"[seer].{kind}")
        raise ConfigError(f"{error}; install the one you mean, or write {kind} = {default!r}")
    return load(name, tables.get(name, {}), f"{kind}.{name}")


def _load_plugins(config: Config) -> list[Plugin]:
    return [load(name, config.plugin.get(name, {}), f"plugin.{name}") for name in config.seer.plugins]


def startup_of(config: Config) -> Startup:
    """Return the run of a config, as hooks see it."""
    return Startup(config.seer.seed, config.base_dir, config.seer.launcher == HERE, _sampling(config))


def _sampling(config: Config) -> Sampling:
    """Return the sampling of prompts that say nothing else."""
    fields = config.rollout.sampling_over(SamplingChoice())
    fields.pop("bad_words", None)
    if isinstance(stop := fields.get("stop"), str):
        fields["stop"] = (stop,) if stop else ()
    return Sampling(**fields)


def fill_slots(config: Config) -> Strategies:
    """Call the factory hooks of every enabled plug-in and return the filled slots.

    Raises:
        ConfigError: a slot has two owners, ``[seer.slots]`` names what cannot fill one, or a plug-in is
            configured wrongly.
        PluginError: a factory raised, or returned something its slot does not take.
    """
    _check_unused_tables(config)
    return fill(config.seer.slots, _load_plugins(config), startup_of(config))


def assemble(config: Config) -> Assembly:
    """Fill every slot, engines included; see ``fill_slots`` for the errors."""
    startup = startup_of(config)
    launcher = _make_one(_load_launcher(config), "launcher", Factories(startup))
    factories = Factories(startup, None if launcher is None else launcher.strategy)
    engines, kv_pool = _load_engines(config), _load_kv_pool(config)
    if launcher is not None:
        for plugin in engines:
            _needs_launcher(plugin, "engine", launcher.owner)
        if kv_pool is not None:
            _needs_launcher(kv_pool, "kv_pool", launcher.owner)
    fleets = {plugin.name: _make_engines(plugin, factories) for plugin in engines}
    _check_engines(fleets)
    pool = _make_one(kv_pool, "kv_pool", factories)
    return Assembly(merge_fleets(fleets), fill_slots(config), pool, launcher)


def _needs_launcher(plugin: Plugin, kind: str, launcher: str) -> None:
    """Refuse an engine that starts no workers by a launcher, and a KV pool of one machine."""
    if "launcher" not in plugin.hooks[MADE_BY[kind]].accepts:
        fact, remedy = (
            ("starts no workers by one", "name another engine")
            if kind == "engine"
            else ("is of one machine", f"write kv_pool = {NO_POOL!r}")
        )
        raise ConfigError(
            f"[seer].launcher = {launcher!r}, but the {kind} {plugin.name!r} {fact}; {remedy}, or launcher ="
            f" {HERE!r}"
        )


def _make_engines(plugin: Plugin, factories: Factories) -> EngineFleet:
    fleet = factories.make(plugin, "engines")
    if fleet is None:
        raise _makes_none(plugin.name, "engine")
    made: EngineFleet = fleet.strategy
    return made


def _make_one(plugin: Plugin | None, kind: str, factories: Factories) -> Slot[Any] | None:
    """Return the launcher or the KV pool of the plug-in that the config names for it."""
    if plugin is None:
        return None
    answer = factories.make(plugin, MADE_BY[kind])
    if answer is None:
        raise _makes_none(plugin.name, kind)
    return answer


def _check_engines(fleets: Mapping[str, EngineFleet]) -> None:
    owners: dict[str, str] = {}
    for owner, fleet in fleets.items():
        for engine in fleet.engines:
            if flaw := flaw_of(engine, InstanceClient):
                raise PluginError(
                    f"plug-in {owner!r} answered hook 'seer_make_engines' with a {type(engine).__name__}"
                    f" among its engines, which is no Engine: {flaw}"
                )
            if (other := owners.get(engine.id)) == owner:
                raise PluginError(
                    f"plug-in {owner!r} made two engines with the id {engine.id!r}; number them"
                )
            if other is not None:
                raise PluginError(
                    f"plug-ins {other!r} and {owner!r} each made an engine with the id {engine.id!r};"
                    " let ids begin with the plug-in's name"
                )
            owners[engine.id] = owner


def _check_unused_tables(config: Config) -> None:
    """Check the tables of plug-ins that the run does not use, as far as their plug-ins are here.

    Raises:
        ConfigError: settings do not fit, a table is of the wrong kind, or its name looks misspelt.
    """
    known = installed()
    for kind in (*MADE_BY, "plugin"):
        for name, table in getattr(config, kind).items():
            where = f"{kind}.{name}"
            if name not in known:
                if name in _used(config, kind) or _is_misspelt(name):
                    raise unknown_plugin(name, f"[{where}]")
            elif name not in _used(config, kind):
                _check_unused(name, table, where)


def _used(config: Config, kind: str) -> tuple[str, ...]:
    """Return the plug-ins that a run takes from the tables of a kind."""
    seer = config.seer
    return {"launcher": (seer.launcher,), "engine": seer.engines, "kv_pool": (seer.kv_pool,)}.get(
        kind, seer.plugins
    )


def _is_misspelt(name: str) -> bool:
    """Return whether a name that no installed plug-in has is nearly that of one."""
    return name not in PLUGINS and bool(get_close_matches(name[:LONGEST_NAME], installed(), 1, MISSPELT))


def _check_unused(name: str, table: Mapping[str, Any], where: str) -> None:
    """Check the settings of a plug-in that is here; a broken one stops no run that does without it."""
    try:
        _, settings, hooks = _import(name, where)
    except PluginError:
        return
    kind = where.partition(".")[0]
    slots = hooks.keys() - {"doctor"}
    makes = [made for made, slot in MADE_BY.items() if slot in slots]
    if kind not in makes if kind in MADE_BY else len(makes) == len(slots) == 1:
        right = makes[0] if makes else "plugin"
        raise ConfigError(f"[{where}]: the settings of {name!r} stand in [{right}.{name}]; rename the table")
    structure(table, settings, where)


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else CORE
