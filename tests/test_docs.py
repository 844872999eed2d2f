"""The documentation: every hook has its heading, examples parse, links lead somewhere, pages stay short."""

import ast
import inspect
import re
import tomllib
from pathlib import Path

import pytest
from seer_host.config_files import load_config
from seer_session.hooks import DECLARED

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("**/*.md"))]

FENCE = re.compile(r"^(?P<fence>`{3,})(?P<language>\w*)[^\n]*\n(?P<body>.*?)^(?P=fence)[ ]*$", re.M | re.S)
HEADING = re.compile(r"^#{1,6} +(.+?) *#*$", re.M)
LINK = re.compile(r"!?\[[^\]]*\]\(<?([^)>\s]+)>?(?: \"[^\"]*\")?\)")


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


def test_the_page_of_hooks_has_a_heading_for_each_with_its_exact_arguments():
    signatures = {
        f"{name}({', '.join(inspect.signature(hook).parameters)})" for name, hook in DECLARED.items()
    }
    page = (ROOT / "docs/reference/hooks.md").read_text()
    assert {heading for heading in headings(page) if heading.startswith("seer_")} == signatures


@pytest.mark.parametrize("source", blocks("python"))
def test_python_examples_parse(source):
    compile(source, "example", "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT | ast.PyCF_ONLY_AST)


@pytest.mark.parametrize("source", blocks("toml"))
def test_toml_examples_parse_and_configs_hold_known_keys_only(source, tmp_path):
    tree = tomllib.loads(source)
    if set(tree) & {"seer", "rollout", "compare", "launcher", "engine", "kv_pool", "plugin"}:
        (tmp_path / "example.toml").write_text(source)
        load_config(tmp_path / "example.toml")


def test_relative_links_lead_to_what_is_there():
    broken = []
    for page in PAGES:
        text = re.sub(r"`[^`\n]*`", "", FENCE.sub("", page.read_text()))
        for link in LINK.findall(text):
            if re.match(r"[a-z]+:", link):
                continue
            path, _, fragment = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            there = target.exists() and (
                not fragment
                or target.suffix != ".md"
                or fragment in {anchor(heading) for heading in headings(target.read_text())}
            )
            if not there:
                broken.append(f"{page.relative_to(ROOT)}: {link}")
    assert broken == []


def test_contributors_are_sent_to_files_that_exist():
    named = re.findall(r"`((?:[a-z_]+/){2,}[\w.]*)`", (ROOT / "CONTRIBUTING.md").read_text())
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_no_page_to_read_has_more_than_250_lines():
    pages = [page for name in ("start", "guides", "explain") for page in (ROOT / "docs" / name).rglob("*.md")]
    assert [page.name for page in pages if len(page.read_text().splitlines()) > 250] == []
