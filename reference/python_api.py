"""docs/reference/python-api.md and its like: public names with their signatures and docstrings."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from reference.frame import Page, markdown
from reference.source import Module, find, module, parts_of

__all__ = ["pages", "public_names"]

USER = """\
These names are for scripts, trainers and clients. [Plug-ins](python-api-plugins.md) stand on others. A name
that is on neither page is not public: it may change without notice."""

AUTHOR = """\
These names are for plug-ins, engines and KV pools. [Hooks](hooks.md) says when each part is called.
[Scripts, trainers and clients](python-api.md) need none of them."""

PAGES = (
    (
        "python-api.md",
        "Python API",
        USER,
        (
            "seer_core",
            "seer_client",
            "seer_journal",
            "seer_rl",
            "seer_trl",
            "seer_slime",
            "seer_skyrl",
        ),
    ),
    (
        "python-api-plugins.md",
        "Python API of plug-ins",
        AUTHOR,
        (
            "seer_core.plugins.hookspecs",
            "seer_core.plugins.config_types",
            "seer_core.plugins.labels",
            "seer_core.ports.policy",
            "seer_core.ports.environment",
            "seer_core.ports.drafting",
            "seer_core.ports.engine",
            "seer_core.ports.kv",
            "seer_core.ports.weights",
            "seer_core.ports.journal",
            "seer_core.ports.clock",
            "seer_core.ports.contracts",
            "seer_core.model.requests",
            "seer_core.model.chunks",
            "seer_testing",
            "seer_worker.client.fleet",
            "seer_worker.process.instance",
        ),
    ),
)
"""Pages: file, title, introduction and the modules whose ``__all__`` is public."""


def pages() -> Iterator[Page]:
    """Yield the pages."""
    for file, title, introduction, names in PAGES:
        found = Page(file, title, introduction)
        for name in names:
            _add_module(found, name)
        yield found


def public_names() -> Iterator[tuple[Module, str]]:
    """Yield every public name, with the module that offers it."""
    for _, _, _, names in PAGES:
        for name in names:
            place = module(name)
            assert place is not None, name
            for each in sorted(place.public):
                yield place, each


def _add_module(page: Page, name: str) -> None:
    place = module(name)
    if place is None or not place.public:
        page.flaws.append(f"{name} has no __all__: list its public names")
        return
    page.heading(2, f"`{name}`")
    page.add(markdown(ast.get_docstring(place.tree) or ""))
    for each in sorted(place.public):
        found = find(place, each)
        if found is None:
            page.flaws.append(f"{name}.{each} is in __all__ and is defined nowhere: remove it")
            continue
        origin, node, text = found
        if not text:
            page.flaws.append(f"{name}.{each} is public and has no docstring: write one")
        page.heading(3, f"`{each}`")
        match node:
            case ast.ClassDef():
                _add_class(page, f"{name}.{each}", origin, node, text or "")
            case ast.FunctionDef() | ast.AsyncFunctionDef():
                page.add(code(signature(node)), markdown(text or ""))
            case _:
                page.add(code(ast.unparse(node)), markdown(text or ""))


def _add_class(page: Page, name: str, place: Module, node: ast.ClassDef, text: str) -> None:
    parts = [each for each in parts_of(place, node) if not _name(each[0]).startswith("_")]
    made = next((each for each, _ in parts_of(place, node) if _name(each) == "__init__"), None)
    bases = f"({', '.join(ast.unparse(each) for each in node.bases)})" if node.bases else ""
    head = [f"class {node.name}{bases}"]
    if isinstance(made, ast.FunctionDef):
        head.append(signature(made, name=node.name, method=True))
    page.add(code("\n".join(head)), markdown(text))
    fields = [each for each in parts if isinstance(each[0], ast.AnnAssign)]
    page.flaws += [
        f"{name}.{_name(each)} is a public field and has no meaning: write one as a string below it, or name"
        " it in the docstring of its class"
        for each, below in fields
        if not below and not re.search(rf"``{_name(each)}\b", text)
    ]
    page.table(["field", "type", "default", "meaning"], [_field(each, below) for each, below in fields])
    for each, below in parts:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef) and not each.name.startswith("test_"):
            if not below:
                page.flaws.append(f"{name}.{each.name} is public and has no docstring: write one")
            page.add(
                f"#### `{node.name}.{each.name}`", code(signature(each, method=True)), markdown(below or "")
            )


def _name(statement: ast.stmt) -> str:
    match statement:
        case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
            return name
        case ast.AnnAssign(target=ast.Name(id=name)):
            return name
    return "_"


def _field(statement: ast.stmt, below: str | None) -> Sequence[str]:
    assert isinstance(statement, ast.AnnAssign)
    default = "" if statement.value is None else f"`{ast.unparse(statement.value)}`"
    return f"`{_name(statement)}`", f"`{ast.unparse(statement.annotation)}`", default, markdown(below or "")


def signature(node: ast.FunctionDef | ast.AsyncFunctionDef, *, name: str = "", method: bool = False) -> str:
    """Return a function's first line; of a property its name and type."""
    decorators = {ast.unparse(each) for each in node.decorator_list}
    returns = f" -> {ast.unparse(node.returns)}" if node.returns and not name else ""
    if decorators & {"property", "cached_property"}:
        return f"{node.name}{returns.replace(' -> ', ': ')}"
    pieces = _pieces(node.args, method and "staticmethod" not in decorators)
    word = "" if name else "async def " if isinstance(node, ast.AsyncFunctionDef) else "def "
    shown = f"{word}{name or node.name}({', '.join(pieces)}){returns}"
    if len(shown) <= 110:
        return shown
    inner = "".join(f"    {piece},\n" for piece in pieces)
    return f"{word}{name or node.name}(\n{inner}){returns}"


def _pieces(arguments: ast.arguments, method: bool) -> list[str]:
    """Return each argument as it stands between commas."""
    positional = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(positional) - len(arguments.defaults)) + list(arguments.defaults)
    found = [_argument(*pair) for pair in zip(positional, defaults, strict=True)][method:]
    if arguments.vararg is not None:
        found.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        found.append("*")
    found += [_argument(*pair) for pair in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    return found + ([f"**{ast.unparse(arguments.kwarg)}"] if arguments.kwarg is not None else [])


def _argument(argument: ast.arg, default: ast.expr | None) -> str:
    sign = " = " if argument.annotation is not None else "="
    return ast.unparse(argument) + ("" if default is None else f"{sign}{ast.unparse(default)}")


def code(text: str) -> str:
    """Return Python as a block that nothing parses: it has signatures without bodies."""
    return f"```text\n{text}\n```"
