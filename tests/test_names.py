"""One class per name in the whole tree, so that a search for a name finds one thing."""

import ast
import subprocess
from collections import defaultdict
from pathlib import Path

TOP = Path(__file__).parents[1]

BY_DESIGN = {
    "AgentLoopManager": "verl looks the class up by this name, in two modules",
    "AgentLoopWorker": "verl looks the class up by this name, in two modules",
    "Completion": "the client has no other package of Seer's, so it has structs of its own",
    "Settings": "the hook of every plug-in takes a class of this name",
}
"""Names that several classes have for good, and why."""


def classes():
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=TOP, capture_output=True, text=True, check=True
    )
    found = defaultdict(list)
    for name in listed.stdout.split("\n"):
        if name.endswith(".py") and "/tests/" not in f"/{name}" and (TOP / name).is_file():
            for node in ast.walk(ast.parse((TOP / name).read_text())):
                if isinstance(node, ast.ClassDef):
                    found[node.name].append(name)
    return found


def test_every_class_has_a_name_of_its_own():
    twice = {name: places for name, places in classes().items() if len(places) > 1 and name not in BY_DESIGN}
    assert twice == {}, "rename all but one, or say in BY_DESIGN why the name stands for several"
