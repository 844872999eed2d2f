"""The core names no plug-in, no command and no other distribution of Seer's: it could do without each."""

import re
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = sorted((ROOT / "seer_core").rglob("*.py"))
PROJECTS = (*ROOT.glob("[a-z]*/pyproject.toml"), *ROOT.glob("[a-z]*/*/pyproject.toml"))
ENTRY_POINTS = [tomllib.loads(file.read_text())["project"].get("entry-points", {}) for file in PROJECTS]
OWN = {"local"}
"""The core's word for child processes of this machine, which is a pool's name too."""
PLUGINS = {name for each in ENTRY_POINTS for name in each.get("seer", {})} - OWN
COMMANDS = {"run", "doctor", "plugins", "config"}
COMMANDS |= {name for each in ENTRY_POINTS for name in each.get("seer.commands", {})}


def names_in(text):
    """Return what a text names that it should not."""
    found = {name for name in PLUGINS if re.search(rf"(?<!\w)[\"'`]+{name}[\"'`]+", text)}
    found |= {name for name in PLUGINS if "_" in name and re.search(rf"\b{name}\b", text)}
    found |= {f"seer {name}" for name in COMMANDS if re.search(rf"\bseer {name}\b", text)}
    return found | set(re.findall(r"\bseer_(?!core\b|make_|doctor\b|session\b)[a-z]+\b", text))


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_file_of_the_core_names_no_plugin_command_or_distribution(file):
    assert names_in(file.read_text()) == set()


def test_such_names_are_found():
    assert {"grouped_spec", "vllm", "ray"} <= PLUGINS
    found = names_in("``grouped_spec``, 'ray', `seer run`, seer_worker")
    assert found == {"grouped_spec", "ray", "seer run", "seer_worker"}
