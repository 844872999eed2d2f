"""Stored results and the pages made from them: each page matches its file, each result names its origin."""

import re
import shlex
from importlib.resources import files

import pytest
from seer_lab.paper.report import PLACE, TEMPLATE

from bench import render
from bench.cases import CASES, chosen, part_of
from bench.harness import RESULTS, ROOT, CasePart, parser_of

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


@pytest.mark.parametrize(
    ("case", "part"), [(name, part) for name, case in CASES.items() for part in case.parts]
)
def test_every_part_of_a_case_asks_a_question_and_names_paths_that_exist(case, part):
    module = part_of(case, part)
    assert CASES[case].question.endswith("?")
    assert module.__doc__.splitlines()[0].endswith("?")
    assert [path for path in module.DEPENDS_ON if not (ROOT / path).exists()] == []
    assert [each for each in vars(CasePart) if not each.startswith("_") and not hasattr(module, each)] == []


def test_every_case_has_a_question_of_its_own_and_is_decided_by_stored_results_of_its_own():
    assert len({case.question for case in CASES.values()}) == len(CASES)
    found = render.results()
    for name, case in CASES.items():
        assert {*case.decides} <= {*render.of_case(found, name)}, name
        assert case.decides, name


def test_every_stored_result_names_its_command_commit_and_machine_and_lies_in_the_folder_of_its_case():
    for name, result in render.results().items():
        case, _ = render.origin_of(result)
        assert (RESULTS / case / f"{name}.json").exists(), name
        assert result.command.startswith(f"python -m bench {result.case}"), name
        assert len(result.commit) >= 7, name
        assert {"cpu", "cores"} <= result.machine.keys(), name


def test_every_command_on_the_page_of_a_case_is_one_of_today():
    command_line = re.compile(r"^\*\*Command\.\*\* `python -m bench ([^`]+)`", re.M)
    pages = render.rendered()
    for case in CASES:
        for command in command_line.findall(pages[render.path_of(case)]):
            name, part, options = chosen(shlex.split(command))
            assert name == case
            parser_of(name, part).parse_args(options)
