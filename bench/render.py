"""Stored results as pages: docs/results, and the README's number between markers."""

from __future__ import annotations

import inspect
import re
import subprocess
from collections.abc import Iterator, Mapping
from os.path import relpath
from pathlib import Path

import msgspec

from bench.harness import RESULTS, ROOT, StoredResult, case_of, git, origin

__all__ = ["rendered", "stale", "write"]

PAGES = ROOT / "docs" / "results"
ANSWERED = "answered"
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.S)
MEDIANS = "A figure is the median of the rounds, followed by [least, most] where they differ."
GENERATED = "<!-- `python -m bench render` writes this page. -->"

SECTIONS = {
    "Does it pay?": ("demo", "cost_models", "unseen_drafts", "paced", "pays", "rivals", "agents"),
    "Are the tokens the same?": ("equality", "models"),
    "What is learnt?": ("learning",),
    "What happens when something dies?": ("cluster_faults", "driver_deaths", "remote"),
    "What does it cost?": (
        "scheduler",
        "family_costs",
        "driver_scale",
        "image_prompts",
        "adapters",
        "draft_step",
        "device_steps",
        "served_drafts",
        "server_agents",
    ),
    "What has run on a GPU?": ("gpu_reports",),
}
"""The cases of the first page, by the question that a reader has."""

INTRODUCTION = """\
Each answer below comes from a stored result in `bench/results`; its page has the table, the method, the
command, the commit and the machine. No whole rollout has been measured on a GPU. Engines ran on CPUs, or on
an [emulated accelerator](paced-vllm.md): an engine's real scheduler, with steps that take the time of a cost
model. Figures such as 1.28x are ratios to veRL's policy unless the sentence names another baseline."""

MORE = """\
## More

- [Reproduction](reproduction.md): the paper's numbers beside ours. {reproduction}
- [The emulated accelerator, measured](paced-vllm.md): how far it and the simulator can be trusted.
- [Answered questions](answered.md): measured once, by scripts that have been removed.
- [Benchmarks](../guides/benchmarks.md): how to measure a result again."""


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
    """Return what every generated page has to hold, and the README with its number."""
    found = results()
    pages = {path_of(name, result): page_of(name, result) for name, result in found.items()}
    answers = msgspec.json.decode((RESULTS / f"{ANSWERED}.json").read_bytes(), type=list[AnsweredQuestion])
    pages[PAGES / f"{ANSWERED}.md"] = answered_page(answers)
    pages[PAGES / "README.md"] = first_page(found)
    readme = ROOT / "README.md"
    pages[readme] = MARKED.sub(
        lambda match: match[1] + inset(found, match["name"]) + match[3], readme.read_text()
    )
    return pages


def path_of(name: str, result: StoredResult) -> Path:
    """Return the file of a result's page: ``PAGE`` of its case, if it has one."""
    path: Path = getattr(case_of(result.case), "PAGE", PAGES / f"{name}.md")
    return path


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


def first_page(found: Mapping[str, StoredResult]) -> str:
    """Return the page that a reader reads first: each question with its answer, by section."""
    parts = [f"{GENERATED}\n# Results", INTRODUCTION]
    for section, cases in SECTIONS.items():
        parts.append(f"## {section}")
        for case in cases:
            mine = {name: result for name, result in found.items() if result.case == case}
            if mine:
                answers = [
                    f"{answer_of(result)} ([table]({relpath(path_of(name, result), PAGES)}))"
                    for name, result in mine.items()
                ]
                question = f"**{case_of(case).__doc__.splitlines()[0]}**"
                if len(answers) == 1:
                    parts.append(f"{question} {answers[0]}")
                else:
                    parts.append("\n".join((f"{question}\n", *(f"- {each}" for each in answers))))
    summary = re.search(r"^\*\*Answer\.\*\* (.*)$", (PAGES / "reproduction.md").read_text(), re.M)
    parts.append(MORE.format(reproduction=summary[1] if summary else ""))
    return "\n\n".join(parts) + "\n"


def inset(found: Mapping[str, StoredResult], name: str) -> str:
    """Return the number that a result has for the README."""
    number: str = case_of(found[name].case).one_number(found[name].rows)  # type: ignore[attr-defined]
    return f"{number}\n"


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
    """Print the results whose code has changed since their commit; return the exit status."""
    lines = list(_stale())
    print("\n".join(lines) if lines else "every stored result is of the code as it is")
    return 0


def _stale() -> Iterator[str]:
    for name, result in results().items():
        paths = case_of(result.case).DEPENDS_ON
        try:
            changed = git("diff", "--name-only", result.commit, "--", *paths).splitlines()
        except subprocess.CalledProcessError:
            yield f"{name}: commit {result.commit} is not in this repository"
            continue
        if changed:
            yield f"{name}: {len(changed)} files have changed since {result.commit}; {result.command}"
