"""The generated reference: complete, and that of the code as it is."""

import ast
import json
import re
import sys
from pathlib import Path
from typing import Annotated

import pytest
from click.testing import CliRunner
from msgspec import Meta, Struct
from openapi_spec_validator import validate
from seer_cli import main
from seer_rl.config import TrainTable

from reference import http_answers, openapi, pages, python_api
from reference.fields import fields_of, meanings_of
from reference.files import SUMMARY
from reference.frame import PAGES, ROOT, Page, markdown
from reference.packages import repository_entry_points
from reference.settings import plugin_tables
from reference.source import find, module
from seer_core.model.results import Summary
from seer_core.plugins.config import CompareTable, RolloutTable, SeerTable

BY_HAND = {"hooks.md", "compatibility.md", "support.md"}
"""Pages of docs/reference that nothing generates."""


class Documented(Struct):
    """A struct with one meaning and one without."""

    limit_tokens: Annotated[int, Meta(ge=1, le=8)] = 4
    """The most tokens."""
    name: str = ""


@pytest.fixture(scope="module")
def rendered():
    return pages.rendered()


def test_every_generated_page_is_that_of_the_code(rendered):
    stale = [f"docs/reference/{name}" for name, text in rendered.items() if not same(PAGES / name, text)]
    assert stale == [], "run `python -m reference`"


def same(path, text):
    return path.exists() and path.read_text() == text


def test_every_page_of_the_reference_is_generated_or_listed_as_written_by_hand(rendered):
    assert {path.name for path in PAGES.iterdir()} == {*rendered, *BY_HAND}


def test_everything_in_the_reference_has_a_meaning():
    assert pages.flaws() == []


def test_a_field_without_a_meaning_is_a_flaw_that_names_it():
    page = Page("x.md", "X")
    page.fields(Documented)
    (flaw,) = page.flaws
    assert "Documented.name has no meaning" in flaw


def test_a_field_is_described_by_its_type_range_default_unit_and_meaning():
    limit, name = fields_of(Documented)
    assert (limit.type, limit.range, limit.default, limit.unit) == ("integer", "1 to 8", "`4`", "tokens")
    assert limit.meaning == "The most tokens."
    assert (name.type, name.range, name.default, name.unit) == ("string", "", '`""`', "")


def test_the_meaning_of_an_inherited_field_is_that_of_its_base():
    class Derived(Documented):
        """A struct that adds nothing."""

    assert meanings_of(Derived)["limit_tokens"] == "The most tokens."


def test_every_setting_of_every_table_is_on_the_page_of_settings():
    text = (PAGES / "settings.md").read_text()
    sections = dict(re.findall(r"^### `\[(.*?)\]`\n(.*?)(?=^##|\Z)", text, re.M | re.S))
    tables = {"seer": SeerTable, "rollout": RolloutTable, "compare": CompareTable, "train": TrainTable}
    tables |= {table.name: table.struct for table in plugin_tables() if table.struct.__struct_fields__}
    for name, struct in tables.items():
        for field in struct.__struct_fields__:
            assert f"| `{field}` |" in sections[name], f"[{name}].{field} is missing"
            nested = getattr(struct, "__annotations__", {}).get(field)
            if isinstance(nested, type) and issubclass(nested, Struct):
                assert f"{name}.{field}" in sections


def test_every_plug_in_of_the_repository_is_on_the_page_of_settings():
    text = (PAGES / "settings.md").read_text()
    for table in plugin_tables():
        assert f"[{table.name}]" in text or f"`{table.name.removeprefix('plugin.')}`" in text


def test_every_command_is_on_the_page_of_commands():
    text = (PAGES / "commands.md").read_text()
    names = {*main.commands, *(point.name for point in repository_entry_points("seer.commands"))}
    assert {"run", "train", "serve", "sim"} <= names
    assert [name for name in names if f"## `seer {name}" not in text] == []


def test_the_document_of_the_http_api_is_valid_openapi():
    document = json.loads((PAGES / "openapi.json").read_text())
    assert document["openapi"].startswith("3.1")
    validate(document)


def test_every_route_of_the_server_is_in_the_document_and_none_besides():
    document = json.loads((PAGES / "openapi.json").read_text())
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert listed == set(openapi.routes())


def test_a_route_that_nothing_describes_is_a_flaw(monkeypatch):
    without = {key: value for key, value in http_answers.OPERATIONS.items() if key[1] != "/v1/wake"}
    monkeypatch.setattr("reference.http_api.OPERATIONS", without)
    monkeypatch.setattr("reference.openapi.OPERATIONS", without)
    assert [flaw for flaw in pages.flaws() if "/v1/wake" in flaw]
    assert "/v1/wake" not in openapi.document()["paths"]


def test_every_public_name_is_on_a_page(rendered):
    text = rendered["python-api.md"] + rendered["python-api-plugins.md"]
    sections = dict(re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S))
    for place, name in python_api.public_names():
        assert f"### `{name}`\n" in sections[place.name], f"{place.name}.{name} is missing"


def test_a_public_name_changes_on_purpose_alone(rendered):
    for page in ("python-api.md", "python-api-plugins.md"):
        found = changes_of_names(listed_names((PAGES / page).read_text()), listed_names(rendered[page]))
        assert not found, "\n".join(found)


def listed_names(text):
    """Return the public names on a page and the methods of classes, each with its module."""
    sections = re.findall(r"^## `([\w.]+)`\n(.*?)(?=^## |\Z)", text, re.M | re.S)
    return {
        f"{module}.{name}" for module, body in sections for name in re.findall(r"^####? `(.+)`", body, re.M)
    }


def changes_of_names(listed, offered):
    """Return a sentence for each public name that is gone, and for each that is new."""
    return [
        f"{name} was public and is gone: it stays for one more minor release, with a warning"
        " (docs/reference/compatibility.md); before the first release, name it in CHANGELOG.md and run"
        " `python -m reference`"
        for name in sorted(listed - offered)
    ] + [
        f"{name} is a new public name: keep it out of __all__, or run `python -m reference` to list it"
        for name in sorted(offered - listed)
    ]


def test_a_public_name_that_is_gone_and_a_new_one_are_sentences():
    gone, new = changes_of_names(
        {"seer_core.Session", "seer_core.Old"}, {"seer_core.Session", "seer_core.New"}
    )
    assert gone.startswith("seer_core.Old was public and is gone")
    assert new.startswith("seer_core.New is a new public name")
    page = "## `seer_core`\n\n### `Old`\n\n#### `Old.part`\n\n## `seer_client`\n\n### `Client`\n"
    assert listed_names(page) == {"seer_core.Old", "seer_core.Old.part", "seer_client.Client"}


def test_a_public_name_without_a_docstring_is_a_flaw(monkeypatch):
    place = module("seer_client")
    node, _ = find(place, "ClientError")[1:]
    monkeypatch.setattr(node, "body", [ast.Pass()])
    assert any("seer_client.ClientError is public and has no docstring" in flaw for flaw in pages.flaws())


def test_no_page_names_a_place_of_this_machine(rendered):
    for name, text in rendered.items():
        assert not [place for place in (ROOT, Path.home(), sys.prefix) if str(place) in text], name


def test_the_keys_of_a_summary_are_those_of_the_page(tmp_path, config_of_sim):
    (tmp_path / "prompts.jsonl").write_text('{"prompt_token_ids": [1, 2, 3], "n": 1, "max_tokens": 4}\n')
    options = ["--prompts", str(tmp_path / "prompts.jsonl"), "--out", str(tmp_path / "out")]
    done = CliRunner().invoke(main, ["run", str(config_of_sim), *options])
    assert done.exit_code == 0, done.output
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary) == {*SUMMARY, *Summary.__struct_fields__}


@pytest.fixture
def config_of_sim(tmp_path):
    path = tmp_path / "rollout.toml"
    path.write_text('[seer]\nengine = "sim"\n')
    return path


def test_a_docstring_becomes_markdown():
    text = "Load ``path``.  Twice.\n\n    Raises:\n        InputError: it cannot\n            be read.\n    "
    assert markdown(text) == "Load `path`. Twice.\n\nRaises:\n\n- `InputError`: it cannot be read."
