"""Configuration files: strict TOML, every value checked, every origin remembered."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from seer_core.errors import SHOWN, ConfigError, printable, quote
from seer_core.model import MOST_RESPONSES
from seer_core.plugins.config_types import NotNegative
from seer_host.discovery import TABLES, offered
from seer_host.json_files import UNREADABLE, describe_flaw, is_text, read_bytes
from seer_host.sampling_fields import MOST_TOP_K, SamplingChoice
from seer_host.tables import SeerTable, SlotsTable, known_keys, nearest, structure

__all__ = ["Config", "RolloutTable", "load_config", "make_config", "read_toml"]

MOST_NESTED = 100
"""Tables within tables; Python's own recursion ends at a thousand calls."""

LEAST_INTEGER, MOST_INTEGER = -(2**63), 2**63 - 1
"""TOML's own limits, which Python's reader does not check."""


class RolloutTable(SamplingChoice, frozen=True, forbid_unknown_fields=False, omit_defaults=False):
    """``[rollout]``: the values for a prompt whose own line does not give them."""

    n: Annotated[int, Meta(ge=1, le=MOST_RESPONSES)] = 8
    """Responses for each prompt."""
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    """The most tokens of a response, prompt excluded."""
    temperature: NotNegative = 1.0
    """The sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    """Tokens are drawn from the most probable ones whose probabilities add up to this."""
    top_k: Annotated[int, Meta(ge=0, le=MOST_TOP_K)] = 0
    """Tokens are drawn from so many of the most probable ones; 0 means no limit."""
    image_roots: tuple[str, ...] = ()
    """Directories beneath which prompts may name images by their paths, relative to the config file. Without
    any it is the directory of the prompts file, and a prompt of a program or of a request has none.
    """


class Config(Struct, frozen=True):
    """A whole configuration: the tables of a config file."""

    seer: SeerTable
    """The table ``[seer]``."""
    rollout: RolloutTable
    """The table ``[rollout]``."""
    tables: Mapping[str, Any]
    """Further tables that are there, by the names that installed commands give them, each as its class."""
    engine: Mapping[str, Mapping[str, Any]]
    """The tables ``[engine.NAME]`` by name, not yet checked; those of engines that are not used, too."""
    plugin: Mapping[str, Mapping[str, Any]]
    """The tables ``[plugin.NAME]`` by name, not yet checked."""
    kv_pool: Mapping[str, Mapping[str, Any]]
    """The tables ``[kv_pool.NAME]`` by name, not yet checked."""
    launcher: Mapping[str, Mapping[str, Any]]
    """The tables ``[launcher.NAME]`` by name, not yet checked."""
    base_dir: Path
    """The directory to which relative paths refer: that of the file."""
    origins: Mapping[str, str]
    """Where each key that was set was set: the file, or ``--set``."""
    blocked: tuple[str, ...] = ()
    """The plug-ins that ``-p no:NAME`` leaves out."""

    def with_plugins(self, plugins: Sequence[str]) -> Config:
        """Return the same configuration with other plug-ins enabled; ``[seer.slots]`` chooses among them."""
        slots = self.seer.slots.only(lambda name: name in plugins)
        seer = msgspec.structs.replace(self.seer, plugins=tuple(plugins), slots=slots)
        return msgspec.structs.replace(self, seer=seer)


def load_config(path: str | Path, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> Config:
    """Read a TOML file, apply ``KEY=VALUE`` overrides, and leave out the plug-ins in ``without``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not what it must be.
    """
    path = Path(path)
    return make_config(read_toml(path), overrides, without, base_dir=path.parent, origin=str(path))


def read_toml(path: Path) -> dict[str, Any]:
    """Read the tables of a TOML file.

    Raises:
        ConfigError: it cannot be read, or is no TOML.
    """
    raw = read_bytes(path, "name an existing TOML file", ConfigError)
    try:
        return tomllib.loads(raw.decode())
    except UNREADABLE as error:
        raise ConfigError(
            f"{path} is not valid TOML: {describe_flaw(error, raw)}; mend it, then run again"
        ) from error


def make_config(
    tree: dict[str, Any],
    overrides: Iterable[str] = (),
    without: Iterable[str] = (),
    *,
    base_dir: Path,
    origin: str,
) -> Config:
    """Check the tables of a config, as ``tomllib`` reads them; ``origin`` says where they are from.

    Otherwise as ``load_config``.
    """
    _check_values(tree, origin)
    tree = deepcopy(tree)
    origins = dict.fromkeys(_leaves(tree), origin)
    for override in overrides:
        key = _override(tree, override)
        origins = {known: where for known, where in origins.items() if not f"{known}.".startswith(f"{key}.")}
        origins |= {
            known: f"--set {override}" for known in _leaves(tree) if f"{known}.".startswith(f"{key}.")
        }
    further = {point.name: point for point in offered(TABLES)}
    known_keys(tree, ("seer", "rollout", "launcher", "engine", "kv_pool", "plugin", *further), "")
    seer = structure(_table(tree, "seer"), SeerTable, "seer")
    gone = tuple(without)
    for name in gone:
        if name not in seer.plugins:
            raise ConfigError(
                f"-p no:{name}: {quote(name)} is not in [seer].plugins{nearest(name, seer.plugins)}"
            )
    if gone:
        seer = msgspec.structs.replace(
            seer,
            plugins=tuple(name for name in seer.plugins if name not in gone),
            slots=seer.slots.only(lambda name: name not in gone),
        )
        origins["seer.plugins"] = " ".join(f"-p no:{name}" for name in gone)
    _no_duplicates(seer.plugins, "[seer].plugins")
    _no_duplicates(seer.engines, "[seer].engine")
    for slot in SlotsTable.__struct_fields__:
        _no_duplicates(seer.slots.chain(slot), f"[seer.slots].{slot}")
    return Config(
        seer,
        _rollout_table(_table(tree, "rollout"), base_dir),
        {name: structure(_table(tree, name), further[name].load(), name) for name in further if name in tree},
        _tables(tree, "engine"),
        _tables(tree, "plugin"),
        _tables(tree, "kv_pool"),
        _tables(tree, "launcher"),
        base_dir.absolute(),
        origins,
        gone,
    )


def _override(tree: dict[str, Any], text: str) -> str:
    if not is_text(text):
        raise ConfigError(f"--set {quote(text)} is not UTF-8; type it anew")
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise ConfigError(
            f"--set {quote(text)} is not KEY=VALUE with a dotted key; for example: --set seer.seed=1"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    except UNREADABLE as error:
        raise ConfigError(
            f"--set {printable(key, SHOWN)}: {describe_flaw(error)}; give a value that can be meant"
        ) from error
    _check_values({key: parsed}, "--set")
    if len(parts) > MOST_NESTED:
        raise ConfigError(
            f"--set {printable(parts[0], SHOWN)}...: its key has {len(parts)} parts; give one of"
            f" {MOST_NESTED} at most"
        )
    table = tree
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {quote(text)}: {quote(part)} is a value, not a table")
    table[parts[-1]] = parsed
    return ".".join(parts)


def _check_values(tree: Mapping[str, Any], origin: str) -> None:
    """Refuse what Python's reader lets pass and what comes later trips over."""
    left: list[tuple[Any, str, int]] = [(tree, "", 0)]
    while left:
        value, key, depth = left.pop()
        flaw = ""
        if depth > MOST_NESTED:
            top = printable(key.split(".")[0], SHOWN)
            raise ConfigError(f"{origin}: {top} is nested more than {MOST_NESTED} deep; write it flatter")
        if isinstance(value, Mapping):
            prefix = f"{key}." if key else ""
            left += [(inner, f"{prefix}{name}", depth + 1) for name, inner in value.items()]
        elif isinstance(value, list | tuple):
            left += [(inner, key, depth + 1) for inner in value]
        elif isinstance(value, str) and "\0" in value:
            flaw = "holds the character zero, which no name and no path has; take it out"
        elif isinstance(value, int) and not LEAST_INTEGER <= value <= MOST_INTEGER:
            flaw = "is an integer beyond 64 bits; write a smaller one"
        if flaw:
            raise ConfigError(f"{origin}: {printable(key, SHOWN)} {flaw}")


def _no_duplicates(names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where} lists {quote(name)} twice; keep one")


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table, not {quote(table)}; write [{name}]")
    return table


def _rollout_table(tree: Mapping[str, Any], base_dir: Path) -> RolloutTable:
    table = structure(tree, RolloutTable, "rollout")
    roots = tuple(str((base_dir / Path(root).expanduser()).absolute()) for root in table.image_roots)
    return msgspec.structs.replace(table, image_roots=roots)


def _tables(tree: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    tables = _table(tree, name)
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(
                f"{name}.{printable(key, SHOWN)} must be a table, not {quote(table)}; write [{name}.NAME]"
            )
    return tables


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
