"""The generated reference: complete, and that of the code as it is."""

import json
import re

import pytest
from openapi_spec_validator import validate
from seer_session.results import Summary

from reference import openapi, pages
from reference.files import SUMMARY
from reference.page import PAGES

BY_HAND = {
    "hooks.md",
    "compatibility.md",
    "support.md",
    "python-api.md",
    "python-api-plugins.md",
    "events.md",
    "models.md",  # of `python -m bench render`
}
"""Pages of docs/reference that `python -m reference` does not write; of some the site adds the docstrings."""


@pytest.fixture(scope="module")
def rendered():
    return pages.rendered()


def test_every_generated_page_is_that_of_the_code(rendered):
    stale = [
        f"docs/reference/{name}"
        for name, text in rendered.items()
        if not (PAGES / name).exists() or (PAGES / name).read_text() != text
    ]
    assert stale == [], "run `python -m reference`"
    assert {path.name for path in PAGES.iterdir()} == {*rendered, *BY_HAND}


def test_everything_in_the_reference_has_a_meaning():
    assert pages.flaws() == []


def test_the_document_of_the_http_api_is_valid_openapi_with_every_route():
    document = openapi.document()
    validate(document)
    listed = {(method.upper(), path) for path, methods in document["paths"].items() for method in methods}
    assert listed == set(openapi.routes())


def test_the_keys_of_a_summary_are_those_of_the_page(seer, write_config, write_prompts, tmp_path):
    prompts = write_prompts({"prompt_token_ids": [1, 2, 3], "n": 1, "max_tokens": 4})
    assert seer("run", write_config(), "--prompts", prompts, "--out", tmp_path / "out").exit_code == 0
    summary = json.loads((tmp_path / "out" / "summary.json").read_text())
    assert set(summary) == {*SUMMARY, *Summary.__struct_fields__}


def test_the_pages_that_the_site_fills_name_modules_that_exist():
    names = [
        name for page in BY_HAND for name in re.findall(r"^::: ([\w.]+)$", (PAGES / page).read_text(), re.M)
    ]
    assert "seer_core" in names
    for name in names:
        __import__(name)
