"""Stored results as pages: docs/results, and the README's tables between markers."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import msgspec

from bench.frame import RESULTS, ROOT, StoredResult, case_of, git, markdown, origin

__all__ = ["rendered", "stale", "write"]

PAGES = ROOT / "docs" / "results"
ANSWERED = "answered"
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.S)
GENERATED = "<!-- `python -m bench render` writes this page. -->"


class AnsweredQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that one script answered once; the script is in the repository's history at ``commit``."""

    question: str
    answer: str
    number: str
    command: str
    commit: str


def results() -> dict[str, StoredResult]:
    """Return the stored results by name."""
    files = sorted(RESULTS.glob("*.json"))
    return {
        file.stem: msgspec.json.decode(file.read_bytes(), type=StoredResult)
        for file in files
        if file.stem != ANSWERED
    }


def rendered() -> dict[Path, str]:
    """Return what every generated page has to hold, and the README with its tables."""
    found = results()
    pages = {PAGES / f"{name}.md": page_of(name, result) for name, result in found.items()}
    answers = msgspec.json.decode((RESULTS / f"{ANSWERED}.json").read_bytes(), type=list[AnsweredQuestion])
    pages[PAGES / f"{ANSWERED}.md"] = answered_page(answers)
    pages[PAGES / "README.md"] = index_page(found)
    readme = ROOT / "README.md"
    pages[readme] = MARKED.sub(
        lambda match: match[1] + inset(found, match["name"]) + match[3], readme.read_text()
    )
    return pages


def page_of(name: str, result: StoredResult) -> str:
    """Return the page of one result."""
    case = case_of(result.case)
    question = case.__doc__.splitlines()[0]
    return f"{GENERATED}\n# {name}\n\n{question}\n\n{case.table(result.rows)}\n\n{origin(result)}\n"


def index_page(found: dict[str, StoredResult]) -> str:
    """Return the list of all results."""
    lines = [
        [f"[{name}]({name}.md)", case_of(result.case).__doc__.splitlines()[0], result.commit, result.date]
        for name, result in found.items()
    ]
    table = markdown(["result", "question", "commit", "date"], lines, left=4)
    more = f"[Answered questions]({ANSWERED}.md): measured once, by scripts that are gone."
    return f"{GENERATED}\n# Results\n\n[How to run a case](../benchmarks.md).\n\n{table}\n\n{more}\n"


def inset(found: dict[str, StoredResult], name: str) -> str:
    """Return a result's short table and its origin; one sentence before it is measured."""
    if name not in found:
        return f"Not measured yet: `python -m bench {name} --json bench/results/{name}.json`\n"
    result = found[name]
    case = case_of(result.case)
    table = getattr(case, "short_table", case.table)(result.rows)
    return f"{table}\n\n{origin(result)}\n"


def answered_page(answers: list[AnsweredQuestion]) -> str:
    """Return the page of questions that are answered and no longer asked."""
    lines = [
        [each.question, each.answer, each.number, f"`{each.command}`", each.commit]
        for each in sorted(answers, key=lambda each: each.question)
    ]
    text = (
        "Each row was measured once, by a script of `bench/` that is in the repository's history at the"
        " commit named, and is not measured again: the figures are of the system at that commit."
    )
    columns = ["question", "answer", "numbers", "command", "commit"]
    table = markdown(columns, lines, left=len(columns))
    return f"{GENERATED}\n# Answered questions\n\n{text}\n\n{table}\n"


def write() -> None:
    """Write all generated pages, and remove those whose result is gone."""
    pages = rendered()
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in PAGES.glob("*.md"):
        if path not in pages:
            path.unlink()
    for path, text in pages.items():
        path.write_text(text)


def stale() -> int:
    """Print the results whose rooms have changed since their commit; return the exit status."""
    lines = list(_stale())
    print("\n".join(lines) if lines else "every stored result is of the code as it is")
    return 0


def _stale() -> Iterator[str]:
    for name, result in results().items():
        rooms = case_of(result.case).ROOMS
        try:
            changed = git("diff", "--name-only", result.commit, "--", *rooms).splitlines()
        except subprocess.CalledProcessError:
            yield f"{name}: commit {result.commit} is not in this repository"
            continue
        if changed:
            yield f"{name}: {len(changed)} files have changed since {result.commit}; {result.command}"
