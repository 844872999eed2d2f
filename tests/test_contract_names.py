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
    "seer_session.environment",
    "seer_session.hookspecs",
    "seer_host.launcher",
    "seer_worker.process.adapter",
]
SPOKEN = re.compile(r"``(\w+(?:\.\w+)+)(?:\(.*?\))?``")
VARIABLES = re.compile(r"(self|request|group|info|plugin|engine|startup|package)\.")
"""Arguments and settings, whose first name is a variable's."""
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


def resolves(name):
    """Return whether a dotted name is a module's, or a member of a class that the contracts have."""
    head, *rest = name.split(".")
    if not head.startswith("seer_"):
        return head in NAMES and has(NAMES[head], rest)
    for length in range(len(rest), -1, -1):
        try:
            return has(importlib.import_module(".".join([head, *rest[:length]])), rest[length:])
        except ModuleNotFoundError:
            continue
    return False


def has(found, members):
    for member in members:
        fields = (*inspect.get_annotations(found),) if isinstance(found, type) else ()
        if member not in fields and not hasattr(found, member):
            return False
        found = getattr(found, member, object)
    return True


@pytest.mark.parametrize("module", CONTRACTS)
def test_a_contract_names_only_what_exists(module):
    source = Path(inspect.getsourcefile(importlib.import_module(module))).read_text()
    texts = [
        node.value
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    names = {name for text in texts for name in SPOKEN.findall(text) if not VARIABLES.match(name)}
    assert [name for name in sorted(names) if not resolves(name)] == []
