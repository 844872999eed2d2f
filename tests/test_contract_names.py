"""Contracts name only what exists: every ``Name.member`` in their docstrings resolves."""

import ast
import importlib
import inspect
import re
from pathlib import Path

import pytest

CONTRACTS = [
    "seer_core.ports.contracts",
    "seer_core.ports.drafting",
    "seer_core.plugins.hookspecs",
    "seer_core.ports.kv",
    "seer_core.ports.policy",
    "seer_core.ports.engine",
    "seer_core.ports.environment",
    "seer_worker.process.instance",
]
SPOKEN = re.compile(r"``(\w+(?:\.\w+)+)(?:\(.*?\))?``")
NAMES = {
    name: value
    for module in (
        *CONTRACTS,
        "seer_core",
        "seer_core.model",
        "seer_core.model.events",
        "seer_core.model.chunks",
    )
    for name, value in vars(importlib.import_module(module)).items()
}


def spoken(module):
    """Yield each dotted name in the docstrings of a module, with its line."""
    path = Path(inspect.getsourcefile(importlib.import_module(module)))
    for node in ast.walk(ast.parse(path.read_text())):
        text = node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else ""
        for name in SPOKEN.findall(text):
            yield name, f"{path.name}:{node.lineno}"


def resolves(name):
    """Return whether a dotted name is a module's, or a member of a class that the contracts have."""
    head, *rest = name.split(".")
    if head.startswith("seer_"):
        for length in range(len(rest), -1, -1):
            try:
                found = importlib.import_module(".".join([head, *rest[:length]]))
            except ModuleNotFoundError:
                continue
            return has(found, rest[length:])
        return False
    return head in NAMES and has(NAMES[head], rest)


def has(found, members):
    for member in members:
        fields = (*inspect.get_annotations(found),) if isinstance(found, type) else ()
        if member not in fields and not hasattr(found, member):
            return False
        found = getattr(found, member, object)
    return True


# Arguments and settings, whose first name is a variable's.
VARIABLES = re.compile(r"(self|request|group|info|plugin|engine|startup|package)\.")


@pytest.mark.parametrize("module", CONTRACTS)
def test_a_contract_names_only_what_exists(module):
    wrong = [
        f"{where}: {name}"
        for name, where in spoken(module)
        if not VARIABLES.match(name) and not resolves(name)
    ]
    assert wrong == []


@pytest.mark.parametrize(
    ("name", "there"),
    [
        ("Drafter.source", True),
        ("Drafter.start", False),
        ("DraftSource.stop", True),
        ("PromptGroup.streams", True),
        ("seer_core.ports.clock.RealClock", True),
        ("seer_core.ports.clock.UnrealClock", False),
        ("Absent.method", False),
    ],
)
def test_a_name_that_is_gone_is_found(name, there):
    assert resolves(name) == there
