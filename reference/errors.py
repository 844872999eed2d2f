"""docs/reference/errors.md: every public exception, its meaning and its remedy."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from reference.packages import packages
from reference.page import Page, markdown

__all__ = ["page"]

ROOTS = ("SeerError", "ClientError")
REMEDY = "Remedy:"
STUBS = {"seer_grouped_spec._index": ("DraftIndexError",)}
"""The errors of compiled modules, whose stubs have no ``__all__``."""

INTRODUCTION = """\
The message of an error names the culprit, the fact and the remedy. Commands print it as one line, and show
the traceback with `--debug`. Exit status 1 stands for `EngineError`, 2 for any other. [HTTP API](http-api.md)
lists the status with which the server answers."""


def page() -> Page:
    """Return the page."""
    found = Page("errors.md", "Errors", INTRODUCTION)
    rows = []
    for owner, node in exceptions():
        meaning, remedy, then = markdown(ast.get_docstring(node) or "").partition(REMEDY)
        if not meaning or not remedy or not then.strip():
            name = f"{owner}.{node.name}"
            found.flaws.append(f"{name} lacks a meaning or a remedy: end its docstring with 'Remedy: ...'")
        base = node.bases[0]
        then = then.strip()
        rows.append((f"`{owner}`", f"`{node.name}`", ast.unparse(base), meaning, then[:1].upper() + then[1:]))
    columns = ("error", "is a", "meaning", "remedy")
    for owner in sorted({row[0] for row in rows}):
        found.heading(2, owner)
        found.table(columns, [(row[1], f"`{row[2]}`", *row[3:]) for row in rows if row[0] == owner])
    return found


def exceptions() -> Iterator[tuple[str, ast.ClassDef]]:
    """Yield the public exceptions with their modules, which are read and not imported."""
    trees = dict(_modules())
    classes = {
        node.name: node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    }
    for name, tree in trees.items():
        public = _public(tree) or STUBS.get(name, ())
        for node in tree.body:
            if isinstance(node, ast.ClassDef) and node.name in public and _is_error(node, classes):
                yield name, node


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Yield all modules of our packages by name."""
    for _, folder in sorted(packages().items()):
        for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):
            parts = file.relative_to(folder.parent).with_suffix("").parts
            if "examples" not in parts:
                name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
                yield name, ast.parse(file.read_text())


def _public(tree: ast.Module) -> tuple[str, ...]:
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                return tuple(ast.literal_eval(value))
    return ()


def _is_error(node: ast.ClassDef, classes: dict[str, ast.ClassDef]) -> bool:
    """Return whether a class is a root or derives from one; a name stands for one class in the whole tree."""
    bases = [base.id for base in node.bases if isinstance(base, ast.Name)]
    return node.name in ROOTS or any(base in ROOTS or _derives(base, classes) for base in bases)


def _derives(name: str, classes: dict[str, ast.ClassDef]) -> bool:
    return name in classes and _is_error(classes[name], classes)
