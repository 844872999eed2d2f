"""Texts about installed plug-ins and the slots that they fill."""

from __future__ import annotations

import ast
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from seer_host.config_files import Config
from seer_session.assembly import assemble, installed
from seer_session.hooks import HOOKS

__all__ = ["MEANINGS", "TIERS", "describe", "offers", "slots_of", "tier_of"]

TIERS = ("supported", "experimental")
"""Values of the attribute ``TIER`` of a plug-in's module; a module without one is experimental."""

MEANINGS = {
    "supported": "runs in every test run, on what it is made for",
    "experimental": "works where it has been run; a part of its purpose, such as a GPU, has not been",
}
"""The tiers in words; ``docs/reference/support.md`` says of each plug-in where it has run."""


def slots_of(config: Config) -> dict[str, tuple[str, ...]]:
    """Return the slots that each enabled plug-in owns; fails as starting a run would."""
    assembly = assemble(config)
    slots = assembly.strategies.slots
    owned = {name: tuple(slot.name for slot in slots if slot.owner == name) for name in config.seer.plugins}
    alone = {slot.owner: (slot.name,) for slot in (assembly.launcher, assembly.kv_pool) if slot is not None}
    return {**dict.fromkeys(config.seer.engines, ("engines",)), **alone, **owned}


def describe(name: str) -> dict[str, str]:
    """Return an installed plug-in's name, distribution and version."""
    dist = installed()[name].dist
    return {
        "name": name,
        "distribution": dist.name if dist is not None else "",
        "version": dist.version if dist is not None else "",
    }


def offers(name: str) -> tuple[str, ...]:
    """Return the slots that an installed plug-in's source defines hooks for, in the order of their calls.

    The result is empty for a plug-in without source, or one that makes its hooks in another way.
    """
    names: set[str] = set()
    for node in ast.walk(_parsed(name)):
        match node:
            case ast.FunctionDef(name=name, decorator_list=marks):
                options = {key.arg: key.value for mark in marks for key in getattr(mark, "keywords", ())}
                if not {"wrapper", "hookwrapper"} & options.keys():
                    names.add(getattr(options.get("specname"), "value", name))
            case ast.ImportFrom(names=imported):
                names.update(each.asname or each.name for each in imported)
            case ast.Assign(targets=targets):
                names.update(each.id for each in targets if isinstance(each, ast.Name))
    return tuple(slot for slot, hook in HOOKS.items() if slot != "doctor" and hook in names)


def tier_of(name: str) -> str:
    """Return the tier of support that an installed plug-in's module declares."""
    for node in _parsed(name).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="TIER")], value=ast.Constant(value=tier)) if tier in TIERS:
                return str(tier)
    return TIERS[-1]


def _parsed(name: str) -> ast.Module:
    """Parse a plug-in's source without importing it; an empty module where that cannot be done."""
    try:
        path = _source(installed()[name].module)
        return _parse(path.read_bytes()) if path is not None else ast.Module([], [])
    except (ImportError, OSError, ValueError, SyntaxError, RecursionError):
        return ast.Module([], [])


def _parse(source: bytes) -> ast.Module:
    """Parse, once more if another parse came between: CPython 3.11 then raises SystemError (gh-106905)."""
    try:
        return ast.parse(source)
    except SystemError:
        return ast.parse(source)


def _source(module: str) -> Path | None:
    """Return a module's file; of all that leads to it nothing is imported."""
    head, *parts = module.split(".")
    spec = find_spec(head)
    for number in range(len(parts)):
        if spec is None or spec.submodule_search_locations is None:
            return None
        inner = ".".join([head, *parts[: number + 1]])
        spec = PathFinder.find_spec(inner, list(spec.submodule_search_locations))
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    return Path(spec.origin)
