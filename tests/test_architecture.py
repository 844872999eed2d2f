"""The drawing of the rooms has the arrows that the imports make, and no other."""

import ast
from itertools import product
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
DRAWING = ROOT / "docs/pictures/architecture.svg"
PACKAGES = {
    "core": "seer_core",
    "cli": "cli/seer_cli",
    "lab": "lab/seer_lab",
    **{room: f"{room}/*/seer_*" for room in ("plugins", "backends", "serving", "training", "contrib")},
}


def imported_by(file):
    """Yield the packages that a module names in its imports."""
    for node in ast.walk(ast.parse(file.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            yield from (each.name.partition(".")[0] for each in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module.partition(".")[0]


def test_the_drawing_has_each_room_and_the_imports_between_them():
    drawing = ElementTree.parse(DRAWING).getroot()
    rooms = {each.get("data-room") for each in drawing.iter() if each.get("data-room")}
    arrows = {
        (each.get("data-from"), each.get("data-to")) for each in drawing.iter() if each.get("data-from")
    }
    assert rooms == set(PACKAGES)
    folders = {
        room: [path for path in ROOT.glob(pattern) if path.is_dir()] for room, pattern in PACKAGES.items()
    }
    room_of = {path.name: room for room, paths in folders.items() for path in paths}
    files = [
        (room, file)
        for room, paths in folders.items()
        for path in paths
        for file in path.rglob("*.py")
        if (path / "examples") not in file.parents
    ]
    imports = {(room, room_of.get(name)) for room, file in files for name in imported_by(file)}
    assert arrows == {(one, other) for one, other in product(rooms, rooms) if one != other} & imports
