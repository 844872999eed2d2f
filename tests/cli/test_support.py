"""docs/reference/support.md names every plug-in of the tree with the tier that its module declares."""

import re
import tomllib
from pathlib import Path

from seer_cli.installed import TIERS, tier_of
from seer_session.assembly import installed

ROOT = Path(__file__).parents[2]
FOLDERS = ("plugins", "backends", "contrib")
ADAPTERS = ("skyrl", "slime")  # with a table of their own


def tiers_of_page():
    table = (ROOT / "docs/reference/support.md").read_text().partition("## Plug-ins")[2].partition("\n## ")[0]
    return dict(re.findall(r"^\| `(\w+)` \| (\w+) \|", table, re.M))


def plugins_of_tree():
    projects = [
        path
        for path in ROOT.glob("*/*/pyproject.toml")
        if path.parts[-3] in FOLDERS and path.parts[-2] not in ADAPTERS
    ]
    metadata = [tomllib.loads(path.read_text()) for path in projects]
    return {name for each in metadata for name in each["project"].get("entry-points", {}).get("seer", {})}


def test_the_page_names_every_plugin_of_the_tree():
    assert set(tiers_of_page()) == plugins_of_tree()


def test_the_tiers_of_the_page_are_those_that_the_modules_declare():
    page = tiers_of_page()
    assert set(page.values()) <= set(TIERS)
    assert {name: tier_of(name) for name in page if name in installed()} == {
        name: tier for name, tier in page.items() if name in installed()
    }


def test_a_plugin_without_a_tier_is_experimental():
    assert tier_of("vllm_ngram") == "experimental"
