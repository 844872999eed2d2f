"""Stored results and the pages made from them: each page matches its file, each result names its origin."""

import re
from importlib.resources import files

import msgspec
import pytest
from seer_lab.paper.report import PLACE, TEMPLATE

from bench import paced_cluster, render
from bench.frame import CASES, ROOT, Case, StoredResult, case_of, cell, turned
from seer_core.model.results import Summary


def test_every_generated_page_is_that_of_its_result():
    pages = render.rendered()
    stale = [str(path.relative_to(ROOT)) for path, text in pages.items() if not same(path, text)]
    assert stale == [], "run `python -m bench render`"
    elsewhere = {render.PAGES / "reproduction.md", render.PAGES / "paced-vllm.md"}
    assert {*render.PAGES.glob("*.md")} - elsewhere == {path for path in pages if path.parent == render.PAGES}


def test_the_page_of_the_reproduction_has_the_text_of_its_template():
    text = files("seer_lab.paper").joinpath(TEMPLATE).read_text()
    pieces = PLACE.split(text)[::2]
    page = (render.PAGES / "reproduction.md").read_text()
    assert re.fullmatch("(.+?)".join(map(re.escape, pieces)), page, re.S), (
        "run `seer reproduce all --seeds 5 --report docs/results/reproduction.md`"
    )


def same(path, text):
    return path.exists() and path.read_text() == text


def test_a_page_of_another_command_stays_when_pages_are_written(tmp_path, monkeypatch):
    monkeypatch.setattr(render, "PAGES", tmp_path)
    (tmp_path / "gone.md").write_text(f"{render.GENERATED}\n# gone\n")
    (tmp_path / "reproduction.md").write_text("# Reproduction\n")
    monkeypatch.setattr(render, "rendered", lambda: {tmp_path / "demo.md": "# demo\n"})
    render.write()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["demo.md", "reproduction.md"]


def test_a_result_that_changes_changes_its_page(tmp_path, monkeypatch):
    name, result = next(iter(render.results().items()))
    before = render.page_of(name, result)
    other = msgspec.structs.replace(result, commit="0123456")
    assert render.page_of(name, other) != before


def test_a_page_has_question_answer_table_method_and_command_in_this_order():
    for name, result in render.results().items():
        page = render.page_of(name, result)
        parts = ["**Question.**", "**Answer.**", "\n|", "**Method.**", f"**Command.** `{result.command}`"]
        places = [page.find(part) for part in parts]
        assert -1 not in places, name
        assert places == sorted(places), name


def test_an_answer_has_the_figures_of_its_rows():
    rows = [
        {"engine": "vllm", "name": name, "ratio_to_baseline": ratios, "tokens_equal_to_baseline": same}
        for name, ratios, same in [
            ("baseline", {}, True),
            ("+ grouped_spec", {"throughput_tokens_per_s": 1.5, "tail_time_s": 0.25}, False),
            ("oracle", {"throughput_tokens_per_s": 9.0, "tail_time_s": 9.0}, True),
        ]
    ]
    assert case_of("demo").answer(rows) == (
        "On vllm, a rollout with all techniques has 1.50x the baseline's throughput and 0.25x its tail time,"
        " and not every arm writes the same tokens."
    )


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


def test_the_figures_of_a_rollout_on_a_cluster_are_those_of_a_summary():
    assert set(paced_cluster.FIGURES) <= set(Summary.__struct_fields__)
