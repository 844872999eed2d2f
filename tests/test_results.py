"""Stored results and the pages made from them: each page matches its file, each result names its origin."""

import msgspec
import pytest

from bench import render
from bench.frame import CASES, ROOT, Case, StoredResult, case_of, cell, turned


def test_every_generated_page_is_that_of_its_result():
    pages = render.rendered()
    stale = [str(path.relative_to(ROOT)) for path, text in pages.items() if not same(path, text)]
    assert stale == [], "run `python -m bench render`"
    assert set(render.PAGES.glob("*.md")) == {path for path in pages if path.parent == render.PAGES}


def same(path, text):
    return path.exists() and path.read_text() == text


def test_a_result_that_changes_changes_its_page(tmp_path, monkeypatch):
    name, result = next(iter(render.results().items()))
    before = render.page_of(name, result)
    other = msgspec.structs.replace(result, commit="0123456")
    assert render.page_of(name, other) != before


@pytest.mark.parametrize("name", CASES)
def test_every_case_asks_a_question_and_names_rooms_that_exist(name):
    case = case_of(name)
    assert case.__doc__.splitlines()[0].endswith("?")
    assert [room for room in case.ROOMS if not (ROOT / room).exists()] == []
    assert [each for each in vars(Case) if not each.startswith("_") and not hasattr(case, each)] == []
    assert case.ROUNDS >= 1


def test_every_stored_result_names_its_command_commit_and_machine():
    for name, result in render.results().items():
        assert result.case in CASES
        assert result.command, name
        assert len(result.commit) >= 7, name
        assert {"cpu", "cores"} <= result.machine.keys(), name


def test_each_arm_comes_first_equally_often_and_rounds_below_zero_warm_up():
    order = list(turned("abc", 3, warm_up=1))
    assert [arm for number, arm in order if number < 0] == ["c", "a", "b"]
    assert [order[at][1] for at in (3, 6, 9)] == ["a", "b", "c"]


def test_a_cell_has_a_spread_only_where_there_is_one():
    assert cell([2.0, 1.0, 4.0], ".1f") == "2.0 [1.0, 4.0]"
    assert cell({"median": 2.0, "least": 2.0, "most": 2.0}, ".2f", "x") == "2.00x"


def test_a_result_is_read_as_it_was_written():
    result = StoredResult(
        case="server", command="c", commit="1234567", date="2026-11-23", machine={}, rows=[{}]
    )
    assert msgspec.json.decode(msgspec.json.encode(result), type=StoredResult) == result
