"""The documentation: every hook has its heading, examples parse, links lead somewhere."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest

from seer_core.plugins import hookspecs
from seer_core.plugins.config import load_config
from seer_core.plugins.loading import HOOKS, SLOTS

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("**/*.md"))]
HOOKS_PAGE = ROOT / "docs/reference/hooks.md"

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)[ ]*$", re.M | re.S)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)")


def hooks():
    """Return every hook's signature as its heading must show it: ``name(argument, argument)``."""
    found = [name for name in vars(hookspecs) if name.startswith("seer_")]
    return [f"{name}({', '.join(inspect.signature(getattr(hookspecs, name)).parameters)})" for name in found]


def headings(text):
    return [heading.replace("`", "") for heading in HEADING.findall(FENCE.sub("", text))]


def blocks(language):
    """Return every code block in a language, named by its page and line."""
    found = []
    for page in PAGES:
        text = page.read_text()
        for match in FENCE.finditer(text):
            if match["language"] == language:
                line = text.count("\n", 0, match.start()) + 2
                found.append(pytest.param(match["body"], id=f"{page.relative_to(ROOT)}:{line}"))
    return found


def anchor(heading):
    """Return the name that GitHub gives a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def test_hooks_are_what_the_loader_looks_for():
    assert {hook.split("(")[0] for hook in hooks()} == set(HOOKS.values())
    assert set(HOOKS) == {*SLOTS, "doctor"}
    for name in HOOKS.values():
        assert getattr(hookspecs, name).__doc__


@pytest.mark.parametrize("hook", hooks())
def test_every_hook_has_a_heading_with_its_exact_arguments_in_docs_hooks_md(hook):
    assert HOOKS_PAGE.exists(), f"write docs/reference/hooks.md with the heading: ## `{hook}`"
    assert hook in headings(HOOKS_PAGE.read_text()), f"docs/reference/hooks.md needs the heading: ## `{hook}`"


def test_no_heading_in_docs_hooks_md_is_of_a_hook_that_does_not_exist():
    page = HOOKS_PAGE.read_text() if HOOKS_PAGE.exists() else ""
    described = {heading for heading in headings(page) if heading.startswith("seer_")}
    assert described <= set(hooks())


@pytest.mark.parametrize("source", blocks("python"))
def test_python_examples_parse(source):
    flags = ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST
    compile(source, "example", "exec", flags)


@pytest.mark.parametrize("source", blocks("toml"))
def test_toml_examples_parse_and_configs_hold_known_keys_only(source, tmp_path):
    tree = tomllib.loads(source)
    if set(tree) & {"seer", "rollout", "compare", "launcher", "engine", "kv_pool", "plugin"}:
        (tmp_path / "example.toml").write_text(source)
        load_config(tmp_path / "example.toml")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_relative_links_lead_to_what_is_there(page):
    text = FENCE.sub("", page.read_text())
    for link in LINK.findall(re.sub(r"`[^`\n]*`", "", text)):
        if re.match(r"[a-z]+:", link):
            continue
        path, _, fragment = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), f"{link} leads nowhere"
        if fragment and target.suffix == ".md":
            anchors = {anchor(heading) for heading in headings(target.read_text())}
            assert fragment in anchors, f"{link}: {target.name} has no such heading"


def test_the_index_of_design_decisions_has_every_one_in_order():
    index = (ROOT / "docs/explain/design.md").read_text()
    pages = sorted((ROOT / "docs/explain/design").glob("*.md"), key=lambda page: index.index(page.name))
    assert [line for line in index.splitlines() if line.startswith("- ")] == [
        f"- [{heading}](design/{page.name}#{anchor(heading)})"
        for page in pages
        for heading in headings(page.read_text())[1:]
    ]


def test_no_page_of_explanations_has_more_than_250_lines():
    lengths = {page: len(page.read_text().splitlines()) for page in (ROOT / "docs/explain").glob("**/*.md")}
    assert [page.name for page, lines in lengths.items() if lines > 250] == []
