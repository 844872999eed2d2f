"""The drawing has every folder of the tree, and what each imports stands in rows below it."""

import ast
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
