"""Stored results and the pages made from them: each page matches its file, each result names its origin."""

import re
from importlib.resources import files

import pytest
from seer_lab.paper.report import PLACE, TEMPLATE

from bench import render
from bench.harness import CASES, ROOT, Case, case_of

BY_HAND = {"reproduction.md", "paced-vllm.md"}
"""Pages of docs/results that `python -m bench render` does not write."""


def test_every_generated_page_is_that_of_its_result():
    pages = render.rendered()
    stale = [
        str(path.relative_to(ROOT))
        for path, text in pages.items()
        if not path.exists() or path.read_text() != text
    ]
    assert stale == [], "run `python -m bench render`"
    written = {path.name for path in pages if path.parent == render.PAGES}
    assert {path.name for path in render.PAGES.glob("*.md")} == written | BY_HAND


def test_the_page_of_the_reproduction_has_the_text_of_its_template():
    text = files("seer_lab.paper").joinpath(TEMPLATE).read_text()
    pieces = PLACE.split(text)[::2]
    page = (render.PAGES / "reproduction.md").read_text()
    assert re.fullmatch("(.+?)".join(map(re.escape, pieces)), page, re.S), (
        "run `seer reproduce all --seeds 5 --report docs/results/reproduction.md`"
    )


@pytest.mark.parametrize("name", CASES)
def test_every_case_asks_a_question_and_names_paths_that_exist(name):
    case = case_of(name)
    assert case.__doc__.splitlines()[0].endswith("?")
    assert [path for path in case.DEPENDS_ON if not (ROOT / path).exists()] == []
    assert [each for each in vars(Case) if not each.startswith("_") and not hasattr(case, each)] == []


def test_every_stored_result_names_its_command_commit_and_machine_and_is_on_the_first_page():
    shown = {name for names in render.SECTIONS.values() for name in names}
    for name, result in render.results().items():
        assert result.case in shown & set(CASES), name
        assert result.command.startswith(f"python -m bench {result.case}"), name
        assert len(result.commit) >= 7, name
        assert {"cpu", "cores"} <= result.machine.keys(), name
