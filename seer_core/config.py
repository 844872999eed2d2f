"""The configuration: strict TOML, every value checked, every origin remembered."""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Iterable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Annotated, Any, TypeVar

import msgspec
from msgspec import Meta, Struct

from seer_core.errors import ConfigError

__all__ = [
    "CompareTable",
    "Config",
    "RolloutTable",
    "SeerTable",
    "explain",
    "load_config",
    "make_config",
    "nearest",
    "structure",
]

T = TypeVar("T", bound=Struct)


class SeerTable(Struct, frozen=True):
    """``[seer]``: which plug-ins and engine a run uses.

    ``max_restarts`` bounds how often one lost instance is started again; ``max_chunk_failures`` how
    often a chunk of one request may fail on living instances.  ``kv_pool`` is the plug-in through which
    instances share KV, or ``none``.
    """

    plugins: tuple[str, ...] = ()
    engine: str = "vllm"
    kv_pool: str = "local"
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    max_restarts: Annotated[int, Meta(ge=0)] = 3
    max_chunk_failures: Annotated[int, Meta(ge=0)] = 3


class RolloutTable(Struct, frozen=True):
    """``[rollout]``: what a prompt gets where its line says nothing; ``top_k`` 0 means no limit."""

    n: Annotated[int, Meta(ge=1)] = 8
    max_tokens: Annotated[int, Meta(ge=1)] = 1024
    temperature: Annotated[float, Meta(ge=0)] = 1.0
    top_p: Annotated[float, Meta(gt=0, le=1)] = 1.0
    top_k: Annotated[int, Meta(ge=0)] = 0


class CompareTable(Struct, frozen=True):
    """``[compare]``: the arms of ``seer compare``.

    ``techniques`` are added one by one; ``oracle``, if not empty, is an arm of its own that is told
    the lengths the baseline found.  ``prompts`` is relative to the config file.
    """

    prompts: str = "prompts.jsonl"
    baseline: tuple[str, ...] = ("group_round_robin",)
    techniques: tuple[str, ...] = ("divided_rollout", "context_sched", "grouped_spec")
    oracle: tuple[str, ...] = ("divided_rollout", "oracle_longest_first")


class Config(Struct, frozen=True):
    """A whole configuration.  ``origins`` maps dotted keys that were set to where they were."""

    seer: SeerTable
    rollout: RolloutTable
    compare: CompareTable
    engine: Mapping[str, Mapping[str, Any]]
    plugin: Mapping[str, Mapping[str, Any]]
    kv_pool: Mapping[str, Mapping[str, Any]]
    base_dir: Path
    origins: Mapping[str, str]

    def with_plugins(self, plugins: Sequence[str]) -> Config:
        """Return the same configuration with other plug-ins enabled."""
        seer = msgspec.structs.replace(self.seer, plugins=tuple(plugins))
        return msgspec.structs.replace(self, seer=seer)


def load_config(path: str | Path, overrides: Iterable[str] = (), without: Iterable[str] = ()) -> Config:
    """Read a TOML file, apply ``KEY=VALUE`` overrides, and leave out the plug-ins in ``without``.

    Raises:
        ConfigError: the file cannot be read, or a key or value is not what it must be.
    """
    path = Path(path)
    try:
        tree = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name an existing TOML file") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    return make_config(tree, overrides, without, base_dir=path.parent, origin=str(path))


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
    tree = deepcopy(tree)
    origins = dict.fromkeys(_leaves(tree), origin)
    for override in overrides:
        key = _override(tree, override)
        origins = {known: where for known, where in origins.items() if not f"{known}.".startswith(f"{key}.")}
        origins |= {
            known: f"--set {override}" for known in _leaves(tree) if f"{known}.".startswith(f"{key}.")
        }
    _known_keys(tree, ("seer", "rollout", "compare", "engine", "kv_pool", "plugin"), "")
    seer = structure(_table(tree, "seer"), SeerTable, "seer")
    gone = tuple(without)
    for name in gone:
        if name not in seer.plugins:
            raise ConfigError(f"-p no:{name}: {name!r} is not in [seer].plugins{nearest(name, seer.plugins)}")
    if gone:
        seer = msgspec.structs.replace(seer, plugins=tuple(name for name in seer.plugins if name not in gone))
        origins["seer.plugins"] = " ".join(f"-p no:{name}" for name in gone)
    _no_duplicates(seer.plugins, "[seer].plugins")
    compare = structure(_table(tree, "compare"), CompareTable, "compare")
    for name in ("baseline", "techniques", "oracle"):
        _no_duplicates(getattr(compare, name), f"[compare].{name}")
    return Config(
        seer,
        structure(_table(tree, "rollout"), RolloutTable, "rollout"),
        compare,
        _tables(tree, "engine"),
        _tables(tree, "plugin"),
        _tables(tree, "kv_pool"),
        base_dir.absolute(),
        origins,
    )


def structure(table: Mapping[str, Any], into: type[T], where: str) -> T:
    """Build ``into`` (a msgspec Struct) from a table; ``where`` is its dotted name for messages.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or a required key missing.
    """
    _known_fields(table, into, where)
    try:
        return msgspec.convert(table, into)
    except msgspec.ValidationError as error:
        key, fact = explain(error)
        value: Any = table.get(key.split("[")[0]) if key else None
        got = f" (got {value!r})" if value is not None else ""
        name = f"[{where}].{key}" if key else f"[{where}]"
        raise ConfigError(f"{name}: {fact}{got}") from error


def explain(error: msgspec.ValidationError) -> tuple[str, str]:
    """Return the key that a validation error is about, empty for the whole, and the fact."""
    fact, _, at = str(error).partition(" - at ")
    return at.strip("`").removeprefix("$").lstrip("."), f"{fact[0].lower()}{fact[1:]}"


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that ends an error about an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name, known, 1, 0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def _override(tree: dict[str, Any], text: str) -> str:
    key, equals, value = text.partition("=")
    parts = key.strip().split(".")
    if not equals or not all(parts) or len(parts) < 2:
        raise ConfigError(
            f"--set {text!r} is not KEY=VALUE with a dotted key;"
            " for example: --set plugin.divided_rollout.chunk_tokens=512"
        )
    try:
        parsed = tomllib.loads(f"value = {value}")["value"]
    except tomllib.TOMLDecodeError:
        parsed = value
    table = tree
    for part in parts[:-1]:
        table = table.setdefault(part, {})
        if not isinstance(table, dict):
            raise ConfigError(f"--set {text!r}: {part!r} is a value, not a table")
    table[parts[-1]] = parsed
    return ".".join(parts)


def _known_fields(table: Mapping[str, Any], into: type[Struct], where: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(into)}
    _known_keys(table, list(fields), where)
    for key, value in table.items():
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
            _known_fields(value, kind, f"{where}.{key}")


def _known_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    for key in table:
        if key not in known:
            place = f"in [{where}]" if where else "at the top level"
            raise ConfigError(f"unknown key {key!r} {place}{nearest(key, known)}")


def _no_duplicates(names: Sequence[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where} lists {name!r} twice; keep one")


def _table(tree: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    table = tree.get(name, {})
    if not isinstance(table, dict):
        raise ConfigError(f"{name} must be a table, not {table!r}; write [{name}]")
    return table


def _tables(tree: Mapping[str, Any], name: str) -> Mapping[str, Mapping[str, Any]]:
    tables = _table(tree, name)
    for key, table in tables.items():
        if not isinstance(table, dict):
            raise ConfigError(f"{name}.{key} must be a table, not {table!r}; write [{name}.NAME]")
    return tables


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterable[str]:
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"
