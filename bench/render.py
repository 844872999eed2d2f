"""Stored results as pages: docs/results, and the README's number between markers."""

from __future__ import annotations

import inspect
import re
import shlex
import subprocess
from collections.abc import Iterator, Mapping
from os.path import relpath
from pathlib import Path

import msgspec

from bench.cases import CASES, SECTIONS, chosen, part_of, today
from bench.harness import RESULTS, ROOT, CasePart, StoredResult, git, origin

__all__ = ["rendered", "stale", "write"]

PAGES = ROOT / "docs" / "results"
ANSWERED = "answered"
MARKED = re.compile(r"(<!-- bench:(?P<name>[\w-]+) -->\n).*?(<!-- /bench -->)", re.S)
MEDIANS = "A figure is the median of the rounds, followed by [least, most] where they differ."
GENERATED = "<!-- `python -m bench render` writes this page. -->"

INTRODUCTION = """\
Each answer is made from the figures of stored results in `bench/results`. The page behind it has the tables,
the method, the command, the commit and the machine, also on other constants and engines. No whole rollout has
been measured on a GPU. Engines ran on CPUs, or on an [emulated accelerator](paced-vllm.md): its scheduler is
the engine's own, and its time is virtual."""

MORE = """\
## More

- [Reproduction](reproduction.md): the paper's numbers beside ours. {reproduction}
- [The emulated accelerator, measured](paced-vllm.md): how far it and the simulator can be trusted.
- [Answered questions](answered.md): measured once, by scripts that have been removed.
- [Benchmarks](../guides/benchmarks.md): how to measure a result again."""


class AnsweredQuestion(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A question that one script answered once; the script is in the repository's history at ``commit``.

    ``again`` is the command that measures the same today, if there is one.
    """

    question: str
    answer: str
    command: str
    commit: str
    again: str = ""


def results() -> dict[str, StoredResult]:
    """Return the stored results by name."""
    files = sorted(RESULTS.glob("*/*.json"))
    return {file.stem: msgspec.json.decode(file.read_bytes(), type=StoredResult) for file in files}


def origin_of(result: StoredResult) -> tuple[str, str]:
    """Return the case and the part that a result is of, by its command."""
    name, part, _ = chosen(shlex.split(today(result.command))[3:])
    return name, part


def module_of(result: StoredResult) -> CasePart:
    """Return the module that renders a result."""
    return part_of(*origin_of(result))


def of_case(found: Mapping[str, StoredResult], case: str) -> dict[str, StoredResult]:
    """Return the results of a case by name, in the order of its parts, first those that decide."""
    mine = {name: origin_of(result)[1] for name, result in found.items() if origin_of(result)[0] == case}
    parts, decides = list(CASES[case].parts), CASES[case].decides
    order = sorted(mine, key=lambda name: (parts.index(mine[name]), name not in decides, name))
    return {name: found[name] for name in order}


def rendered() -> dict[Path, str]:
    """Return what every generated page has to hold, and the README with its number."""
    found = results()
    pages = {path_of(case): page_of(case, found) for case in CASES}
    answers = msgspec.json.decode((RESULTS / f"{ANSWERED}.json").read_bytes(), type=list[AnsweredQuestion])
    pages[PAGES / f"{ANSWERED}.md"] = answered_page(answers)
    pages[PAGES / "README.md"] = first_page(found)
    pages = {path: linked(text, path, found) for path, text in pages.items()}
    readme = ROOT / "README.md"
    pages[readme] = MARKED.sub(
        lambda match: match[1] + inset(found, match["name"]) + match[3], readme.read_text()
    )
    return pages


def path_of(case: str) -> Path:
    """Return the file of a case's page."""
    return PAGES.parent / (CASES[case].page or f"{PAGES.name}/{case}.md")


def linked(text: str, path: Path, found: Mapping[str, StoredResult]) -> str:
    """Return a page in which ``(NAME.md)`` is a link to where the result of that name is."""

    def place(match: re.Match[str]) -> str:
        name = match[2]
        target = relpath(PAGES / f"{name}.md", path.parent)
        if name in found and name not in CASES:
            case = origin_of(found[name])[0]
            alone = len(of_case(found, case)) == 1
            target = relpath(path_of(case), path.parent) + ("" if alone else f"#{name}")
        return f"]({target})" if match[1] else f"([{name}]({target}))"

    return re.sub(r"(\]?)\(([\w-]+)\.md\)", place, text)


def page_of(case: str, found: Mapping[str, StoredResult]) -> str:
    """Return the page of a case: question, answer, and each result with its table, method and command."""
    mine = of_case(found, case)
    several = len(mine) > 1
    parts = [
        GENERATED + f"\n# {case}",
        f"**Question.** {CASES[case].question}",
        f"**Answer.** {' '.join(answers_of(case, found))}",
    ]
    explained: set[CasePart] = set()
    for name, result in mine.items():
        module = module_of(result)
        question, _, method = inspect.cleandoc(module.__doc__).partition("\n")
        if several:
            parts += [f"## {name}", *([] if module in explained else [question]), answer_of(result)]
        parts.append(module.table(result.rows))
        if module not in explained:
            explained.add(module)
            plain = re.sub("(?<=[.!?])  ", " ", method.strip()).replace("``", "`")
            parts.append(f"**Method.** {plain}")
        parts.append(f"**Command.** {origin(result)}")
    return "\n\n".join([*parts, MEDIANS]) + "\n"


def answer_of(result: StoredResult) -> str:
    """Return what a result shows, in sentences that its part makes of the rows.

    Raises:
        AttributeError: the part has no function ``answer``; every part of a stored result needs one.
    """
    answer: str = module_of(result).answer(result.rows)  # type: ignore[attr-defined]
    return answer


def answers_of(case: str, found: Mapping[str, StoredResult]) -> list[str]:
    """Return what the results show that decide a case."""
    return [answer_of(found[name]) for name in CASES[case].decides]


def first_page(found: Mapping[str, StoredResult]) -> str:
    """Return the page that a reader reads first: each question with its answer, by section."""
    parts = [f"{GENERATED}\n# Results", INTRODUCTION]
    for section, cases in SECTIONS.items():
        parts.append(f"## {section}")
        for name, case in cases.items():
            parts.append(f"**[{case.question}]({relpath(path_of(name), PAGES)})**")
            parts.append("\n".join(f"- {answer}" for answer in answers_of(name, found)))
    summary = re.search(r"^\*\*Answer\.\*\* (.*)$", (PAGES / "reproduction.md").read_text(), re.M)
    parts.append(MORE.format(reproduction=summary[1] if summary else ""))
    return "\n\n".join(parts) + "\n"


def inset(found: Mapping[str, StoredResult], name: str) -> str:
    """Return the number that a result has for the README."""
    number: str = module_of(found[name]).one_number(found[name].rows)  # type: ignore[attr-defined]
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
        again = f"; today: `{today(each.again)}`" if each.again else ""
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
        paths = module_of(result).DEPENDS_ON
        try:
            changed = git("diff", "--name-only", result.commit, "--", *paths).splitlines()
        except subprocess.CalledProcessError:
            yield f"{name}: commit {result.commit} is not in this repository"
            continue
        if changed:
            yield f"{name}: {len(changed)} files have changed since {result.commit}; {today(result.command)}"
