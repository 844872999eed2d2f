"""Put a run together: find plug-ins that are installed, load those that the config names, fill the slots."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from difflib import get_close_matches
from importlib.metadata import EntryPoint, EntryPoints
from typing import Any

from msgspec import Struct
from seer_host.config_files import Config
from seer_host.contract_checks import flaw_of
from seer_host.discovery import REMEDIES, offered
from seer_host.sampling_fields import SamplingChoice
from seer_host.tables import LONGEST_NAME, nearest, structure

from seer_core.error_origin import describe_error, is_ctrl_c
from seer_core.errors import ConfigError, PluginError, printable, quote
from seer_core.model.sampling import Sampling
from seer_core.plugins.hookspecs import PROJECT, Startup
from seer_core.plugins.slots import Assembly, Strategies
from seer_core.ports.engine import EngineFleet, InstanceClient
from seer_core.scheduling.scheduler import CORE, Slot
from seer_session.factories import Factories, fill
from seer_session.hooks import HOOKS, Plugin, SeerPluginManager, read_hooks
from seer_session.merge_fleets import merge_fleets

__all__ = [
    "HOOKS",
    "MADE_BY",
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
NONE = {"launcher": HERE, "kv_pool": NO_POOL}
"""Keys of ``[seer]`` to the word that names no plug-in."""

MISSPELT = 0.75
"""How alike two names are, as ``difflib`` counts it, of which one is taken for the other misspelt."""

MADE_BY = {"launcher": "launcher", "engine": "engines", "kv_pool": "kv_pool"}
"""Keys of ``[seer]`` that name plug-ins of their own, and kinds of tables, to the slot these fill."""

MADE = {"launcher": "a launcher", "engine": "engines", "kv_pool": "a KV pool"}
"""What these make, in words."""

UNLAUNCHED = {
    "engine": "starts no workers by one; name another engine",
    "kv_pool": f"is of one machine; write kv_pool = {NO_POOL!r}",
}
"""What these are that do not ask for the launcher, and the remedy."""


class NoSettings(Struct, frozen=True):
    """Settings of a plug-in that has none."""


def installed() -> dict[str, EntryPoint]:
    """Return every plug-in that an installed distribution offers, by name; imports none."""
    return {point.name: point for point in sorted(_entry_points(), key=lambda each: each.name)}


def _entry_points() -> EntryPoints:
    return offered(PROJECT)


def unknown_plugin(name: str, where: str) -> ConfigError:
    """Return the error for a name, standing at ``where``, that no installed plug-in has."""
    place = printable(where, 100)
    if remedy := _remedy(name):
        return ConfigError(f"{place}: the plug-in {quote(name)} is not installed here; {remedy}")
    return ConfigError(f"{place}: no installed plug-in is called {quote(name)}{nearest(name, installed())}")


def _remedy(name: str) -> str:
    """Return how to install a plug-in that is not here, if a distribution that is here says so."""
    return next(filter(None, (point.load()(name) for point in offered(REMEDIES))), "")


def _entry_point(name: str, where: str) -> EntryPoint:
    """Find the one plug-in of that name."""
    points = {point.value: point for point in _entry_points().select(name=name)}
    if not points:
        raise unknown_plugin(name, where)
    if len(points) > 1:
        owners = " and ".join(sorted(_distribution(point) for point in points.values()))
        raise PluginError(f"plug-in name {name!r} is offered by {owners}; uninstall one")
    return points.popitem()[1]


def load(name: str, table: Mapping[str, Any] | None, where: str, *, used: bool = True) -> Plugin:
    """Import a plug-in and check its settings against its ``Settings``; a table of None checks none.

    A table that is not ``used`` only has to stand in its place.

    Raises:
        ConfigError: unknown name, one that stands where its hooks do not belong, or settings that do not fit.
        PluginError: two distributions offer the name, it cannot be imported, or a hook of it is none of
            ours.
    """
    point = _entry_point(name, where)
    try:
        namespace = point.load()
    except BaseException as error:
        if is_ctrl_c(error):
            raise
        raise PluginError(
            f"plug-in {name!r} cannot be imported: {describe_error(error, point.module)};"
            f" mend or reinstall {_distribution(point)}, or run with -p no:{name}"
        ) from error
    kind = getattr(namespace, "Settings", NoSettings)
    if not (isinstance(kind, type) and issubclass(kind, Struct)):
        raise PluginError(
            f"plug-in {name!r}: its `Settings` is {quote(kind)}; make it a class of msgspec.Struct"
        )
    hooks = read_hooks(name, namespace)
    hooks.pop("doctor", None)
    settings = None
    if table is not None:
        # Before the settings: an error about those would hide that the plug-in stands in the wrong place.
        stands = where.partition(".")[0]
        if (right := _right_kind(hooks, stands)) != stands:
            raise _misplaced(name, where, right, used)
        settings = structure(table, kind, where)
    return Plugin(name, point.module, namespace, settings, hooks)


def _right_kind(hooks: Mapping[str, Any], kind: str) -> str:
    """Return the kind of table where a plug-in's settings belong: the one where they stand, if they may."""
    makes = [made for made, slot in MADE_BY.items() if hooks.get(slot)]
    if kind in makes or (kind == "plugin" and not len(makes) == len(hooks) == 1):
        return kind
    return makes[0] if makes else "plugin"


def _misplaced(name: str, where: str, right: str, used: bool) -> ConfigError:
    """Return the error for a plug-in, or its table alone, that stands where something else is named."""
    kind = where.partition(".")[0]
    if not used:
        return ConfigError(f"[{where}]: the settings of {name!r} stand in [{right}.{name}]; rename the table")
    if kind in MADE_BY:
        return _makes_none(name, kind)
    return ConfigError(
        f'{name!r} in [seer].plugins makes {MADE[right]} only; write {right} = "{name}" instead'
    )


def _makes_none(name: str, kind: str) -> ConfigError:
    """Return the error for a plug-in that ``[seer]`` names in vain for its launcher, engine or KV pool."""
    default = f", or {NONE[kind]!r}" if kind in NONE else ""
    what = MADE[kind].removeprefix("a ")
    return ConfigError(f"plug-in {name!r} makes no {what}; [seer].{kind} must name one that does{default}")


def load_enabled(config: Config) -> list[tuple[str, Plugin]]:
    """Load what a config enables: launcher, engines, KV pool, plug-ins, each with its kind of table."""
    _check_unused_tables(config)
    if not config.seer.engines:
        raise ConfigError(
            "[seer].engine names no engine; write `engine =` with the plug-in that makes the instances, or a"
            f" list of several; installed are: {', '.join(installed())}"
        )
    return [(kind, plugin) for kind in (*MADE_BY, "plugin") for plugin in _load_kind(config, kind)]


def _load_kind(config: Config, kind: str) -> list[Plugin]:
    """Load the plug-ins that a run takes from the tables of a kind."""
    names = [name for name in _used(config, kind) if name != NONE.get(kind)]
    for name in names:
        if kind in NONE and name not in installed():
            error = unknown_plugin(name, f"[seer].{kind}")
            raise ConfigError(f"{error}; install the one you mean, or write {kind} = {NONE[kind]!r}")
    tables = getattr(config, kind)
    return [load(name, tables.get(name, {}), f"{kind}.{name}") for name in names]


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
    plugins = _load_kind(config, "plugin")
    return fill(config.seer.slots, plugins, Factories(_manager(plugins, config), startup_of(config)))


def assemble(config: Config) -> Assembly:
    """Fill every slot, engines included; see ``fill_slots`` for the errors."""
    enabled = load_enabled(config)
    used = {kind: [plugin for each, plugin in enabled if each == kind] for kind in (*MADE_BY, "plugin")}
    factories = Factories(_manager([plugin for _, plugin in enabled], config), startup_of(config))
    launcher = next(iter(_make("launcher", used, factories)), None)
    if launcher is not None:
        factories.launcher = launcher.strategy
        for kind in ("engine", "kv_pool"):
            for plugin in used[kind]:
                _needs_launcher(plugin, kind, launcher.owner)
    fleets = {made.owner: made.strategy for made in _make("engine", used, factories)}
    _check_engines(fleets)
    pool = next(iter(_make("kv_pool", used, factories)), None)
    strategies = fill(config.seer.slots, used["plugin"], factories)
    return Assembly(merge_fleets(fleets), strategies, pool, launcher)


def _manager(plugins: Sequence[Plugin], config: Config) -> SeerPluginManager:
    return SeerPluginManager(plugins, config.blocked, debug=config.seer.debug)


def _make(kind: str, used: Mapping[str, list[Plugin]], factories: Factories) -> list[Slot[Any]]:
    """Return the launcher, the engines or the KV pool of the plug-ins that the config names for it."""
    slots = []
    for plugin in factories.manager.answering(MADE_BY[kind], used[kind]):
        if (made := factories.make(plugin, MADE_BY[kind])) is None:
            raise _makes_none(plugin.name, kind)
        slots.append(made)
    return slots


def _needs_launcher(plugin: Plugin, kind: str, launcher: str) -> None:
    """Refuse an engine that starts no workers by a launcher, and a KV pool of one machine."""
    if not plugin.asks(MADE_BY[kind], "launcher"):
        raise ConfigError(
            f"[seer].launcher = {launcher!r}, but the {kind} {plugin.name!r} {UNLAUNCHED[kind]}, or launcher"
            f" = {HERE!r}"
        )


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
                with suppress(PluginError):  # a broken one stops no run that does without it
                    load(name, table, where, used=False)


def _used(config: Config, kind: str) -> tuple[str, ...]:
    """Return the plug-ins that a run takes from the tables of a kind."""
    names = getattr(config.seer, {"engine": "engines", "plugin": "plugins"}.get(kind, kind))
    return (names,) if isinstance(names, str) else names


def _is_misspelt(name: str) -> bool:
    """Return whether a name that no installed plug-in has is nearly that of one."""
    return not _remedy(name) and bool(get_close_matches(name[:LONGEST_NAME], installed(), 1, MISSPELT))


def _distribution(point: EntryPoint) -> str:
    return point.dist.name if point.dist is not None else CORE
