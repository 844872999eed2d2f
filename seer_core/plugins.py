"""Plug-ins: discover what is installed, load only what the config names, fill the slots, freeze."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from typing import Any

import attrs
from msgspec import Struct

from seer_core.blame import fault
from seer_core.config import Config, nearest, structure
from seer_core.drafting import Drafter
from seer_core.errors import ConfigError, PluginError, SeerError, printable, quote
from seer_core.hooks import HOOKS, offered_slots, read_hooks
from seer_core.hookspecs import PROJECT, Check, Startup
from seer_core.kv import KVPool
from seer_core.policy import Observer, Placer, Prioritizer, Splitter
from seer_core.ports import Engine, EnginePool
from seer_core.scheduler import CORE, Policies, Slot

__all__ = [
    "HOOKS",
    "Assembly",
    "Plugin",
    "Strategies",
    "assemble",
    "describe",
    "fill_slots",
    "installed",
    "load",
    "load_enabled",
    "offers",
    "slots_of",
    "unknown_plugin",
]

SLOTS: Mapping[str, type] = {
    "engines": EnginePool,
    "kv_pool": KVPool,
    "splitter": Splitter,
    "prioritizer": Prioritizer,
    "placer": Placer,
    "drafter": Drafter,
    "observer": Observer,
}
"""Slot name to the Protocol its strategy satisfies."""

NO_POOL = "none"
"""What ``[seer].kv_pool`` says where instances are to share no KV."""


class NoSettings(Struct, frozen=True):
    """Settings of a plug-in that has none."""


@attrs.frozen
class Plugin:
    """A loaded plug-in: its name in the config, its module, its checked settings, and its hooks by slot."""

    name: str
    module: str
    settings: Any
    hooks: Mapping[str, Callable[..., Any]]
    doctor: Callable[..., list[Check]] | None


@attrs.frozen
class Strategies:
    """Every slot but the engines' and the KV pool's, filled; the drafter's may stay empty."""

    policies: Policies
    observers: tuple[Slot[Observer], ...] = ()
    drafter: Slot[Drafter] | None = None

    @property
    def slots(self) -> list[Slot[Any]]:
        """All that are filled, the core's defaults included."""
        policies = self.policies
        drafters = () if self.drafter is None else (self.drafter,)
        return [policies.splitter, policies.prioritizer, policies.placer, *drafters, *self.observers]


@attrs.frozen
class Assembly:
    """All slots filled; nothing started."""

    pool: EnginePool
    strategies: Strategies
    kv_pool: Slot[KVPool] | None = None


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
    point = _entry_point(name, where)
    try:
        namespace = point.load()
    except (Exception, SystemExit) as error:
        raise PluginError(
            f"plug-in {name!r} cannot be imported: {fault(error, point.module)};"
            f" mend or reinstall {_distribution(point)}, or run with -p no:{name}"
        ) from error
    kind = getattr(namespace, "Settings", NoSettings)
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        raise PluginError(
            f"plug-in {name!r}: its `Settings` is {quote(kind)}; make it a class of msgspec.Struct"
        )
    hooks = read_hooks(name, namespace)
    doctor = hooks.pop("doctor", None)
    settings = None
    if table is not None:
        _check_place(
            name, hooks, where.partition(".")[0]
        )  # first: a setting it lacks is not the trouble then
        settings = structure(table, kind, where)
    return Plugin(name, point.module, settings, hooks, doctor)


def _check_place(name: str, hooks: Mapping[str, Any], kind: str) -> None:
    """Refuse a plug-in that stands where the config names what makes something else."""
    if kind == "engine" and "engines" not in hooks:
        raise ConfigError(f"plug-in {name!r} makes no engines; [seer].engine must name one that does")
    if kind == "kv_pool" and "kv_pool" not in hooks:
        raise ConfigError(
            f"plug-in {name!r} makes no KV pool; [seer].kv_pool must name one that does, or {NO_POOL!r}"
        )
    for slot, key, what in (("engines", "engine", "engines"), ("kv_pool", "kv_pool", "a KV pool")):
        if kind == "plugin" and set(hooks) == {slot}:
            raise ConfigError(f'{name!r} in [seer].plugins makes {what} only; write {key} = "{name}" instead')


def load_enabled(config: Config) -> list[tuple[str, Plugin]]:
    """Load what a config enables: the engine, the KV pool, the plug-ins, each with its kind of table."""
    _known_tables(config)
    kv_pool = _load_kv_pool(config)
    return [
        ("engine", _load_engine(config)),
        *([] if kv_pool is None else [("kv_pool", kv_pool)]),
        *(("plugin", plugin) for plugin in _load_plugins(config)),
    ]


def _load_engine(config: Config) -> Plugin:
    name = config.seer.engine
    return load(name, config.engine.get(name, {}), f"engine.{name}")


def _load_kv_pool(config: Config) -> Plugin | None:
    name = config.seer.kv_pool
    if name == NO_POOL:
        return None
    if name not in installed():
        error = unknown_plugin(name, "[seer].kv_pool")
        raise ConfigError(f"{error}; install the one you mean, or write kv_pool = {NO_POOL!r}")
    return load(name, config.kv_pool.get(name, {}), f"kv_pool.{name}")


def _load_plugins(config: Config) -> list[Plugin]:
    return [load(name, config.plugin.get(name, {}), f"plugin.{name}") for name in config.seer.plugins]


def slots_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the slots that each enabled plug-in owns; fails as starting a run would."""
    assembly = assemble(config)
    slots = assembly.strategies.slots
    owned = {name: tuple(slot.name for slot in slots if slot.owner == name) for name in config.seer.plugins}
    kv_pool = {} if assembly.kv_pool is None else {assembly.kv_pool.owner: ("kv_pool",)}
    return {config.seer.engine: ("engines",), **kv_pool, **owned}


def offers(name: str) -> tuple[str, ...]:
    """Return the slots that an installed plug-in would fill, as far as its source tells; it is not run."""
    return offered_slots(installed()[name])


def describe(name: str) -> dict[str, str]:
    """Return an installed plug-in's name, distribution and version."""
    dist = installed()[name].dist
    return {
        "name": name,
        "distribution": dist.name if dist is not None else "",
        "version": dist.version if dist is not None else "",
    }


def fill_slots(config: Config) -> Strategies:
    """Call the factory hooks of every enabled plug-in and return the filled slots.

    Raises:
        ConfigError: a slot has two owners, or a plug-in is configured wrongly.
        PluginError: a factory raised, or returned something its slot does not take.
    """
    startup = Startup(config.seer.seed, config.base_dir)
    _known_tables(config)
    plugins = _load_plugins(config)
    owned: dict[str, Slot[Any]] = {}
    for slot in ("splitter", "prioritizer", "placer", "drafter"):
        answers = _answers(plugins, slot, startup)
        if len(answers) > 1:
            names = " and ".join(repr(answer.owner) for answer in answers)
            raise ConfigError(f"slot {slot!r} is claimed by {names}; keep one in [seer].plugins")
        if answers:
            owned[slot] = answers[0]
    drafter = owned.pop("drafter", None)
    return Strategies(Policies(**owned), tuple(_answers(plugins, "observer", startup)), drafter)


def assemble(config: Config) -> Assembly:
    """Fill every slot, engines included; see ``fill_slots`` for the errors."""
    startup = Startup(config.seer.seed, config.base_dir)
    plugin = _load_engine(config)
    pools = _answers([plugin], "engines", startup)
    if not pools:
        raise ConfigError(f"plug-in {plugin.name!r} makes no engines; [seer].engine must name one that does")
    _check_engines(pools[0])
    return Assembly(pools[0].strategy, fill_slots(config), _make_kv_pool(config, startup))


def _make_kv_pool(config: Config, startup: Startup) -> Slot[KVPool] | None:
    plugin = _load_kv_pool(config)
    if plugin is None:
        return None
    answers = _answers([plugin], "kv_pool", startup)
    if not answers:
        raise ConfigError(
            f"plug-in {plugin.name!r} makes no KV pool; [seer].kv_pool must name one that does,"
            f" or {NO_POOL!r}"
        )
    return answers[0]


def _answers(plugins: Sequence[Plugin], slot: str, startup: Startup) -> list[Slot[Any]]:
    answers = []
    for plugin in plugins:
        if slot not in plugin.hooks:
            continue
        try:
            strategy = plugin.hooks[slot](settings=plugin.settings, startup=startup)
        except SeerError:
            raise
        except Exception as error:
            raise PluginError(
                f"plug-in {plugin.name!r} raised in hook 'seer_make_{slot}': {fault(error, plugin.module)};"
                f" run without it: {_without(plugin.name, slot)}"
            ) from error
        if strategy is None:
            continue
        _check_type(plugin.name, slot, strategy)
        answers.append(Slot(slot, plugin.name, strategy))
    return answers


def _without(name: str, slot: str) -> str:
    """Return the option that leaves a plug-in out, or what to name instead of it."""
    if slot == "engines":
        return "name another one in [seer].engine"
    return "--set seer.kv_pool=none" if slot == "kv_pool" else f"-p no:{name}"


def _check_type(name: str, slot: str, strategy: Any) -> None:
    protocol = SLOTS[slot]
    if isinstance(strategy, type):
        raise PluginError(
            f"plug-in {name!r} answered hook 'seer_make_{slot}' with the class {strategy.__name__};"
            " return an object of it"
        )
    if not isinstance(strategy, protocol):
        members = {*vars(protocol), *protocol.__annotations__}
        public = {member for member in members if not member.startswith("_")} | ({"__len__"} & members)
        missing = sorted(member for member in public if not hasattr(strategy, member))
        raise PluginError(
            f"plug-in {name!r} answered hook 'seer_make_{slot}' with a {type(strategy).__name__}, which"
            f" is no {protocol.__name__}: it lacks {', '.join(missing)}"
        )


def _check_engines(slot: Slot[EnginePool]) -> None:
    seen: set[str] = set()
    for engine in slot.strategy.engines:
        if not isinstance(engine, Engine):
            raise PluginError(
                f"plug-in {slot.owner!r} answered hook 'seer_make_engines' with a {type(engine).__name__}"
                " among its engines, which is no Engine"
            )
        if engine.id in seen:
            raise PluginError(
                f"plug-in {slot.owner!r} made two engines with the id {engine.id!r}; number them"
            )
        seen.add(engine.id)


def _known_tables(config: Config) -> None:
    known = installed()
    for kind, tables in (("engine", config.engine), ("kv_pool", config.kv_pool), ("plugin", config.plugin)):
        for name in tables:
            if name not in known:
                raise unknown_plugin(name, f"[{kind}.{name}]")


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else CORE
