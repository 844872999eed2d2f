"""The drawing has every folder, each imports from rows below, and wings use published modules alone."""

import ast
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
DRAWING = ROOT / "docs/pictures/architecture.svg"
PACKAGES = {
    "core": "seer_core",
    **{name: f"{name}/seer_*" for name in ("cli", "host", "lab", "session", "testing", "trace")},
    **{name: f"{name}/*/seer_*" for name in ("plugins", "backends", "serving", "training", "contrib")},
}
UPWARD = {("plugins", "cli")}
"""Imports that go up: a command of a plug-in's shows and writes as the others do."""

PUBLISHED_BY = ("python-api.md", "python-api-plugins.md", "events.md")
"""Pages of docs/reference, which name each published module."""


def imported_by(file):
    """Yield the packages that a module names in its imports."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_each_folder_imports_from_rows_below_its_own():
    drawing = ElementTree.parse(DRAWING).getroot()
    row = {
        each.get("data-folder"): int(each.get("data-row")) for each in drawing.iter() if each.get("data-row")
    }
    assert row.keys() == PACKAGES.keys()
    paths = {name: [path for path in ROOT.glob(each) if path.is_dir()] for name, each in PACKAGES.items()}
    folder_of = {path.name: name for name, found in paths.items() for path in found}
    files = [
        (name, file)
        for name, found in paths.items()
        for path in found
        for file in path.rglob("*.py")
        if (path / "examples") not in file.parents
    ]
    imports = {
        (name, folder_of[each]) for name, file in files for each in imported_by(file) if each in folder_of
    }
    assert {(one, other) for one, other in imports if one != other and row[one] <= row[other]} == UPWARD


def modules_of(package):
    """Return the names of a package's modules, and of the packages in it."""
    files = [file for file in package.rglob("*.py") if package / "examples" not in file.parents]
    names = (".".join(file.relative_to(package.parent).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__") for name in names}


def test_the_contract_of_contrib_forbids_every_module_of_the_tree_that_is_not_published():
    [contract] = [
        each
        for each in tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
        if each["name"] == "What is contributed stands on published interfaces alone"
    ]
    packages = {name: list(ROOT.glob(each)) for name, each in PACKAGES.items()}
    contributed = {path.name for path in packages.pop("contrib") if path.is_dir()}
    assert {*contract["source_modules"]} == contributed
    pages = [(ROOT / "docs/reference" / name).read_text() for name in PUBLISHED_BY]
    published = {name for page in pages for name in re.findall(r"^::: (\S+)", page, re.M)}
    modules = {name for found in packages.values() for path in found for name in modules_of(path)}
    holds = {name.rpartition(".")[0] for name in published} | {name.partition(".")[0] for name in published}

    def is_forbidden(name):
        return any(f"{name}.".startswith(f"{each}.") for each in contract["forbidden_modules"])

    assert {name for name in modules - published - holds if not is_forbidden(name)} == set()
    assert {name for name in contract["forbidden_modules"] if name not in modules} == set()
