"""docs/reference/errors.md: every public exception, its meaning and its remedy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reference.frame import Page, markdown
from reference.packages import packages
from reference.source import Module, ancestors, modules

__all__ = ["page"]

ROOTS = ("SeerError", "ClientError")
REMEDY = "Remedy:"

INTRODUCTION = """\
The message of an error names the culprit, the fact and the remedy. Commands print it as one line, and show
the traceback with `--debug`. Exit status 1 stands for `EngineError`, 2 for any other. [HTTP API](http-api.md)
lists the status with which the server answers."""


def page() -> Page:
    """Return the page."""
    found = Page("errors.md", "Errors", INTRODUCTION)
    rows = []
    for module, node in exceptions():
        meaning, remedy, then = markdown(ast.get_docstring(node) or "").partition(REMEDY)
        if not meaning or not remedy or not then.strip():
            name = f"{module.name}.{node.name}"
            found.flaws.append(f"{name} lacks a meaning or a remedy: end its docstring with 'Remedy: ...'")
        base = node.bases[0]
        then = then.strip()
        rows.append(
            (f"`{module.name}`", f"`{node.name}`", ast.unparse(base), meaning, then[:1].upper() + then[1:])
        )
    columns = ("error", "is a", "meaning", "remedy")
    for owner in sorted({row[0] for row in rows}):
        found.heading(2, owner)
        found.table(columns, [(row[1], f"`{row[2]}`", *row[3:]) for row in rows if row[0] == owner])
    return found


def exceptions() -> Iterator[tuple[Module, ast.ClassDef]]:
    """Yield the public exceptions, in order of their modules and lines."""
    for package in sorted(packages()):
        for module in modules(package):
            for node in module.tree.body:
                if isinstance(node, ast.ClassDef) and node.name in module.public and is_error(module, node):
                    yield module, node


def is_error(module: Module, node: ast.ClassDef) -> bool:
    """Return whether a class is one of the two roots, or derives from one."""
    return any(each.name in ROOTS for each in ancestors(module, node))
