"""The tables of a configuration, and the strict check of any table against its class."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import msgspec
from msgspec import Meta, Struct

from seer_core.errors import ConfigError, quote
from seer_core.plugins.config_types import Seconds
from seer_core.runtime.restarts import RestartsTable
from seer_core.scheduling.scheduler import CORE
from seer_host.json_files import explain_error

__all__ = [
    "SeerTable",
    "SlotsTable",
    "TurnsTable",
    "known_keys",
    "nearest",
    "structure",
]

T = TypeVar("T", bound=Struct)

MISSING = re.compile("object missing required field `(.*)`")
"""How msgspec says it."""
LONGEST_NAME = 100
"""Characters of a name that are compared with those known, which takes long for long ones."""

Names = str | tuple[str, ...]


def _tuple(names: Names) -> tuple[str, ...]:
    """Return one name, several, or an empty string for none as a tuple."""
    if isinstance(names, str):
        return (names,) if names else ()
    return names


class SlotsTable(Struct, frozen=True):
    """``[seer.slots]``: the plug-in that fills a slot which several enabled plug-ins offer to fill.

    Empty stands for the one that offers it, and ``seer-core`` for what the core does without a plug-in.  Of a
    list, each strategy wraps the next one.
    """

    splitter: Names = ""
    """The plug-in that cuts requests into chunks, or a list in which each wraps the next."""
    prioritizer: Names = ""
    """The plug-in that orders waiting requests, or a list in which each wraps the next."""
    placer: Names = ""
    """The plug-in that chooses an instance for a chunk, or a list in which each wraps the next."""
    drafter: str = ""
    """The plug-in that drafts tokens. Drafters do not wrap one another."""
    environment: str = ""
    """The plug-in that answers the turns of responses. Environments do not wrap one another."""

    def chain(self, slot: str) -> tuple[str, ...]:
        """Return the names that fill a slot, the outermost first; none where nothing is said."""
        return _tuple(getattr(self, slot))

    def only(self, kept: Callable[[str], bool]) -> SlotsTable:
        """Return the same choice among the plug-ins that are kept."""

        def left(slot: str) -> tuple[str, ...]:
            return tuple(name for name in self.chain(slot) if name == CORE or kept(name))

        drafter, environment = ("".join(left(slot)) for slot in ("drafter", "environment"))
        return SlotsTable(left("splitter"), left("prioritizer"), left("placer"), drafter, environment)


class TurnsTable(Struct, frozen=True):
    """``[seer.turns]``: the limits of an environment, which answers the turns of responses."""

    timeout_s: Seconds = 60.0
    """The longest that one answer may take; the response of a later one ends in an error."""
    at_once: Annotated[int, Meta(ge=1)] = 256
    """The most answers that are worked on at once; other turns wait for theirs."""


class SeerTable(Struct, frozen=True):
    """``[seer]``: which plug-ins and engine a run uses."""

    plugins: tuple[str, ...] = ()
    """The plug-ins that are enabled, by name. Besides them the engine, the KV pool and the launcher are
    imported, and the plug-ins whose settings stand in the file.
    """
    engine: Names = ()
    """The plug-in that makes the instances, or several that make some each, of one model. A run needs at
    least one.
    """
    launcher: str = "local"
    """The plug-in that starts the workers of engines, or ``local`` for child processes on this machine."""
    kv_pool: str = "none"
    """The plug-in through which instances share KV, or ``none``."""
    seed: Annotated[int, Meta(ge=0, le=2**63 - 1)] = 0
    """The number from which all sampling seeds follow that prompts do not bring themselves."""
    restarts: RestartsTable = RestartsTable()
    """How often, and how soon, a lost instance is started again."""
    max_chunk_failures: Annotated[int, Meta(ge=0)] = 3
    """How often a chunk of one request may fail on living instances before the request ends in an error."""
    weights_dir: str = ""
    """The directory for a copy of updated weights, which instances that start later load; relative to the
    config file. Empty stands for the temporary directory, ``none`` for no copy.
    """
    debug: bool = False
    """Ends a run where a plug-in changes what it was given, or an observer raises, and logs each call of a
    hook. ``--debug`` sets it.
    """
    slots: SlotsTable = SlotsTable()
    """The plug-in for each slot that several enabled ones offer to fill."""
    turns: TurnsTable = TurnsTable()
    """The limits of an environment, which answers the turns of responses."""

    @property
    def engines(self) -> tuple[str, ...]:
        """The names in ``engine``, as a tuple also where it is one."""
        return _tuple(self.engine)


def structure(table: Mapping[str, Any], into: type[T], where: str) -> T:
    """Build ``into`` (a msgspec Struct) from a table; ``where`` is its dotted name for messages.

    Raises:
        ConfigError: an unknown key, a wrong type, a value out of range, or a required key missing.
    """
    _known_fields(table, into, where)
    try:
        return msgspec.convert(table, into)
    except msgspec.ValidationError as error:
        key, fact = explain_error(error)
        value: Any = table.get(key.split("[")[0]) if key else None
        got = f" (got {quote(value)})" if value is not None else ""
        name = f"[{where}].{key}" if key else f"[{where}]"
        if missing := MISSING.fullmatch(fact):
            field = missing.group(1)
            raise ConfigError(
                f"{name} lacks `{field}`, which has no default; add a line: {field} = ..."
            ) from error
        hint = nearest(str(value), _choices(into, key)) if fact.startswith("invalid enum value") else ""
        raise ConfigError(f"{name}: {fact}{hint or got}") from error


def _choices(into: type[Struct], key: str) -> tuple[str, ...]:
    """Return the words of which the setting ``key`` has to be one, if it is of that kind."""
    kinds = [field.type for field in msgspec.structs.fields(into) if field.encode_name == key]
    return get_args(kinds[0]) if kinds and get_origin(kinds[0]) is Literal else ()


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint that ends an error about an unknown name."""
    known = sorted(known)
    close = difflib.get_close_matches(name[:LONGEST_NAME], known, 1, 0.5)
    if close:
        return f"; did you mean {close[0]!r}?"
    return f"; known: {', '.join(known)}" if known else ""


def _known_fields(table: Mapping[str, Any], into: type[Struct], where: str) -> None:
    fields = {field.encode_name: field.type for field in msgspec.structs.fields(into)}
    known_keys(table, list(fields), where)
    for key, value in table.items():
        kind = fields[key]
        if isinstance(kind, type) and issubclass(kind, Struct) and isinstance(value, dict):
            _known_fields(value, kind, f"{where}.{key}")


def known_keys(table: Mapping[str, Any], known: Sequence[str], where: str) -> None:
    """Raise ConfigError where a table, with this dotted name for messages, has a key of another name."""
    for key in table:
        if key not in known:
            place = f"in [{where}]" if where else "at the top level"
            raise ConfigError(f"unknown key {quote(key)} {place}{nearest(key, known)}")
