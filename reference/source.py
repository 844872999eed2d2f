"""Modules as their source has them: read, not imported, so that no dependency has to be there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import attrs

from reference.packages import packages

__all__ = ["Module", "ancestors", "find", "module", "modules", "parts_of"]

Definition = ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef | ast.Assign | ast.AnnAssign


@attrs.frozen(eq=False)
class Module:
    """A module's source: the tree, its public names, and the module of each name that it imports."""

    name: str
    tree: ast.Module
    public: tuple[str, ...]
    imported: dict[str, str]

    def definition(self, name: str) -> tuple[Definition, str | None] | None:
        """Return the statement that defines a name here, and the string below an assignment, if any."""
        for node, below in zip(self.tree.body, [*self.tree.body[1:], None], strict=True):
            match node:
                case ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef() if node.name == name:
                    return node, ast.get_docstring(node)
                case ast.Assign(targets=[ast.Name(id=found)]) | ast.AnnAssign(target=ast.Name(id=found)) if (
                    found == name
                ):
                    return node, text_of(below)
        return None


@cache
def module(name: str) -> Module | None:
    """Return one of our modules, None if there is none of the name."""
    package, *rest = name.split(".")
    folder = packages().get(package)
    if folder is None:
        return None
    base = folder.joinpath(*rest)
    for file in (base / "__init__.py", base.with_suffix(".py"), base.with_suffix(".pyi")):
        if file.is_file():
            return _read(name, file)
    return None


def _read(name: str, file: Path) -> Module:
    tree = ast.parse(file.read_text())
    public: tuple[str, ...] = ()
    imported: dict[str, str] = {}
    stars: list[str] = []
    for node in tree.body:
        match node:
            case ast.Assign(targets=[ast.Name(id="__all__")], value=value):
                public = tuple(ast.literal_eval(value))
            case ast.ImportFrom(module=str(origin), names=names):
                imported |= {each.asname or each.name: origin for each in names if each.name != "*"}
                stars += [origin for each in names if each.name == "*"]
    if file.suffix == ".pyi":
        public = tuple(each.name for each in tree.body if isinstance(each, ast.ClassDef | ast.FunctionDef))
    if public:
        return Module(name, tree, public, imported)
    whole = [found for origin in stars if (found := module(origin)) is not None]
    imported |= {each: found.name for found in whole for each in found.public}
    return Module(name, tree, tuple(each for found in whole for each in found.public), imported)


def modules(package: str) -> Iterator[Module]:
    """Yield all modules of a package, by name."""
    folder = packages()[package]
    for file in sorted([*folder.rglob("*.py"), *folder.rglob("*.pyi")]):
        parts = file.relative_to(folder.parent).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        if "examples" not in parts and (found := module(name)) is not None:
            yield found


def find(place: Module, name: str) -> tuple[Module, Definition, str | None] | None:
    """Return where a name comes from that a module has, defines or loads on first use."""
    if (found := place.definition(name)) is not None:
        return place, *found
    if name in place.imported and (origin := module(place.imported[name])) is not None:
        return find(origin, name)
    if name in place.public:
        for each in modules(place.name):
            if each is not place and (found := each.definition(name)) is not None:
                return each, *found
    return None


def parts_of(place: Module, node: ast.ClassDef) -> Iterator[tuple[ast.stmt, str | None]]:
    """Yield fields and functions of a class, those it inherits from ours included, each with its text."""
    seen: set[str] = set()
    for owner in ancestors(place, node):
        for statement, below in zip(owner.body, [*owner.body[1:], None], strict=True):
            match statement:
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                    text = ast.get_docstring(statement)
                case ast.AnnAssign(target=ast.Name(id=name)):
                    text = text_of(below)
                case _:
                    continue
            if name not in seen:
                seen.add(name)
                yield statement, text


def ancestors(place: Module, node: ast.ClassDef) -> Iterator[ast.ClassDef]:
    """Yield a class and our classes that it derives from."""
    yield node
    for base in node.bases:
        name = base.value if isinstance(base, ast.Subscript) else base
        if isinstance(name, ast.Name) and (found := find(place, name.id)) is not None:
            origin, definition, _ = found
            if isinstance(definition, ast.ClassDef):
                yield from ancestors(origin, definition)


def text_of(node: ast.stmt | None) -> str | None:
    """Return the text of a statement that is a string, None for any other."""
    match node:
        case ast.Expr(value=ast.Constant(value=str(text))):
            return text
    return None
