"""Stored results as pages: docs/results, and the README's tables between markers."""

from __future__ import annotations

import inspect
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
MEDIANS = "A figure is the median of the rounds, followed by [least, most] where they differ."
GENERATED = "<!-- `python -m bench render` writes this page. -->"


class AnsweredQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that one script answered once; the script is in the repository's history at ``commit``.

    ``again`` is the command of a case that measures the same today, if there is one.
    """

    question: str
    answer: str
    command: str
    commit: str
    again: str = ""


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
    """Return the page of one result: question, answer, table, method, command."""
    case = case_of(result.case)
    question, _, method = inspect.cleandoc(case.__doc__).partition("\n")
    parts = [
        GENERATED + f"\n# {name}",
        f"**Question.** {question}",
        f"**Answer.** {answer_of(result)}",
        case.table(result.rows),
        f"**Method.** {re.sub('(?<=[.!?])  ', ' ', method.strip()).replace('``', '`')}\n\n{MEDIANS}",
        f"**Command.** {origin(result)}",
    ]
    return "\n\n".join(parts) + "\n"


def answer_of(result: StoredResult) -> str:
    """Return what a result shows, in a sentence that its case makes of the rows.

    Raises:
        AttributeError: the case has no function ``answer``; every case of a stored result needs one.
    """
    case = case_of(result.case)
    answer: str = case.answer(result.rows)  # type: ignore[attr-defined]
    return answer


def index_page(found: dict[str, StoredResult]) -> str:
    """Return the list of all results."""
    lines = [
        [
            case_of(result.case).__doc__.splitlines()[0],
            answer_of(result),
            f"[{name}]({name}.md)",
            result.commit,
            result.date,
        ]
        for name, result in found.items()
    ]
    columns = ["question", "answer", "page", "commit", "date"]
    more = "\n".join(
        [
            "- [Reproduction](reproduction.md): the numbers of the paper beside ours, by `seer reproduce`.",
            f"- [Answered questions]({ANSWERED}.md): measured once, by scripts that are gone.",
            "- [Benchmarks](../guides/benchmarks.md): how to measure a result again.",
        ]
    )
    return f"{GENERATED}\n# Results\n\n{markdown(columns, lines, left=len(columns))}\n\n{more}\n"


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
    parts = [
        f"{GENERATED}\n# Answered questions",
        "Each question was answered once, by a script that is in the repository's history at the commit\n"
        "named. The figures are of the system at that commit. Where a case measures the same today, its\n"
        "command follows. Brackets hold the least and the most of several rounds.",
    ]
    for each in sorted(answers, key=lambda each: each.question):
        again = f"; today: `{each.again}`" if each.again else ""
        parts += [f"## {each.question}", each.answer, f"`{each.command}` at commit {each.commit}{again}"]
    return "\n\n".join(parts) + "\n"


def write() -> None:
    """Write all generated pages, and remove those whose result is gone."""
    pages = rendered()
    PAGES.mkdir(parents=True, exist_ok=True)
    for path in PAGES.glob("*.md"):
        if path not in pages and path.read_text().startswith(GENERATED):
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
